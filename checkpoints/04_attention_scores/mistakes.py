"""Wrong code for scores and softmax, by the name of the known mistake.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def repeated(k: np.ndarray, n_heads: int) -> np.ndarray:
    return np.repeat(k, n_heads // len(k), axis=0)


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.einsum("thd,hcd->htc", q, repeated(k, q.shape[1]))


def causal(scores: np.ndarray, diagonal: int) -> np.ndarray:
    seq, ctx = scores.shape[1:]
    return np.where(np.triu(np.ones((seq, ctx)), k=ctx - seq + diagonal) == 1, np.float32(-np.inf), scores)


def no_mask(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return products(q, k) / np.float32(np.sqrt(q.shape[-1]))


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


WRONG = {
    "attention_scores": {
        "mask-missing": no_mask,
        "mask-hides-itself-but-first": mask_too_early_but_for_the_first,
        "mask-reversed": mask_upside_down,
        "mask-ignores-cache": mask_from_the_first_key,
        "mask-minus-ten": mask_of_minus_ten,
    },
}
UNTYPED = {
    "scores-scaled-by-hidden": "typed in 07: only the block knows the width of the model",
    "scores-scaled-by-hidden-over-heads": "typed in 07: only the block knows the width of the model",
    "mask-after-softmax": "typed in 07: it needs both functions, scores without a mask and a mask on the shares",
}
