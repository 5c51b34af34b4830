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


def always_tied(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    return normed(x, final_norm, eps) @ embed_tokens.T


def counted_from_one(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    z = right(x, final_norm, lm_head, embed_tokens, eps)
    return np.concatenate([z[:, 1:], z[:, :1]], axis=1)


def capped_as_in_gemma(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    return np.tanh(right(x, final_norm, lm_head, embed_tokens, eps) / 30) * 30


def log_softmax(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    z = right(x, final_norm, lm_head, embed_tokens, eps)
    return z - np.logaddexp.reduce(z, axis=-1, keepdims=True)


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
        "logits-tied-wrongly": always_tied,
        "logits-rows-shifted": counted_from_one,
        "logits-soft-capped": capped_as_in_gemma,
        "logits-are-log-probabilities": log_softmax,
    }
}
UNTYPED: dict[str, str] = {}
