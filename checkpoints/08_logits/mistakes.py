"""Wrong code for the logits, by the name of the known mistake."""

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


def read_as_inputs_by_outputs(
    x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float
) -> Array:
    output = embed_tokens if lm_head is None else lm_head
    return normed(x, final_norm, eps) @ output.reshape(x.shape[1], -1)


def never_filled(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    return normed(x, final_norm, eps) @ np.zeros_like(embed_tokens).T


WRONG = {
    "logits": {
        "weight-dimensions-not-reversed": read_as_inputs_by_outputs,
        "weight-never-loaded": never_filled,
        "logits-final-norm-skipped": norm_left_out,
        "logits-final-norm-twice": normed_twice,
    }
}
UNTYPED: dict[str, str] = {}
