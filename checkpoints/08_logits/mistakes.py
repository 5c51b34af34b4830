"""Wrong code for the logits, by the name of the known mistake.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np

Array = np.ndarray


def normed(x: Array, gain: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def right(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    return normed(x, final_norm, eps) @ (embed_tokens if lm_head is None else lm_head).T


def norm_left_out(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    return x @ (embed_tokens if lm_head is None else lm_head).T


def normed_twice(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    return right(normed(x, final_norm, eps), final_norm, lm_head, embed_tokens, eps)


WRONG = {
    "logits": {
        "logits-final-norm-skipped": norm_left_out,
        "logits-final-norm-twice": normed_twice,
    }
}
UNTYPED: dict[str, str] = {}
