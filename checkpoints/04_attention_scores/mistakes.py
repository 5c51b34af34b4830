"""Wrong code for scores and softmax, by the name of the known mistake."""

import numpy as np


def repeated(k: np.ndarray, n_heads: int) -> np.ndarray:
    return np.repeat(k, n_heads // len(k), axis=0)


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.einsum("thd,hcd->htc", q, repeated(k, q.shape[1]))


def causal(scores: np.ndarray, diagonal: int) -> np.ndarray:
    seq, ctx = scores.shape[1:]
    return np.where(np.triu(np.ones((seq, ctx)), k=ctx - seq + diagonal) == 1, np.float32(-np.inf), scores)


def not_scaled(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return causal(products(q, k), 1)


def divided_by_the_width(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return causal(products(q, k) / q.shape[-1], 1)


def no_mask(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return products(q, k) / np.float32(np.sqrt(q.shape[-1]))


def mask_too_late(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return causal(products(q, k) / np.float32(np.sqrt(q.shape[-1])), 2)


def mask_too_early(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return causal(products(q, k) / np.float32(np.sqrt(q.shape[-1])), 0)


def mask_too_early_but_for_the_first(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = products(q, k) / np.float32(np.sqrt(q.shape[-1]))
    masked = causal(scores, 0)
    if scores.shape[1] == scores.shape[2]:
        masked[:, 0, 0] = scores[:, 0, 0]  # "a row cannot be empty"
    return masked


def mask_upside_down(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = products(q, k) / np.float32(np.sqrt(q.shape[-1]))
    seq, ctx = scores.shape[1:]
    return np.where(np.tril(np.ones((seq, ctx), bool), k=ctx - seq - 1), np.float32(-np.inf), scores)


def mask_from_the_first_key(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = products(q, k) / np.float32(np.sqrt(q.shape[-1]))
    for t in range(scores.shape[1]):
        scores[:, t, t + 1 :] = -np.inf
    return scores


def mask_of_minus_ten(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = products(q, k) / np.float32(np.sqrt(q.shape[-1]))
    seq, ctx = scores.shape[1:]
    return scores - np.float32(10) * np.triu(np.ones((seq, ctx), np.float32), k=ctx - seq + 1)


def keys_tiled(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    k = np.concatenate([k] * (q.shape[1] // len(k)))
    return causal(np.einsum("thd,hcd->htc", q, k) / np.float32(np.sqrt(q.shape[-1])), 1)


def products_in_half(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        scores = products(q, k).astype(np.float16).astype(np.float32)
    return causal(scores / np.float32(np.sqrt(q.shape[-1])), 1)


def scores_in_half(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = products(q, k) / np.float32(np.sqrt(q.shape[-1]))
    return causal(scores.astype(np.float16).astype(np.float32), 1)


def wrong_axis(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def first_axis(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=0, keepdims=True))
    return e / e.sum(axis=0, keepdims=True)


def axis_forgotten(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max())
    return e / e.sum()


def powers_of_two(scores: np.ndarray) -> np.ndarray:
    e = np.exp2(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def not_divided(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores - scores.max(axis=-1, keepdims=True))


WRONG = {
    "attention_scores": {
        "scores-not-scaled": not_scaled,
        "scores-divided-by-head-dim": divided_by_the_width,
        "mask-missing": no_mask,
        "mask-shows-next": mask_too_late,
        "mask-hides-itself": mask_too_early,
        "mask-hides-itself-but-first": mask_too_early_but_for_the_first,
        "mask-reversed": mask_upside_down,
        "mask-ignores-cache": mask_from_the_first_key,
        "mask-minus-ten": mask_of_minus_ten,
        "groups-tiled-for-keys": keys_tiled,
        "scores-in-half": products_in_half,
        "scaled-scores-in-half": scores_in_half,
    },
    "attention_probs": {
        "softmax-over-queries": wrong_axis,
        "softmax-over-heads": first_axis,
        "softmax-over-all": axis_forgotten,
        "softmax-base-two": powers_of_two,
        "softmax-not-divided": not_divided,
    },
}
UNTYPED = {
    "scores-scaled-by-hidden": "typed in 07: only the block knows the width of the model",
    "scores-scaled-by-hidden-over-heads": "typed in 07: only the block knows the width of the model",
    "mask-after-softmax": "typed in 07: it needs both functions, scores without a mask and a mask on the shares",
}
