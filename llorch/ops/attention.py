"""Causal attention with grouped heads, in three steps, one per lesson.

    scores  = q k^T / sqrt(head_dim), -inf for keys after the query
    probs   = softmax(scores)
    context = probs v, heads joined

    dL/dprobs  = dL/dcontext v^T                          dL/dv = probs^T dL/dcontext
    dL/dscores = probs * (dL/dprobs - sum(dL/dprobs * probs))        sum over the keys; 0 where probs is 0
    dL/dq      = dL/dscores k / sqrt(head_dim)            dL/dk = dL/dscores^T q / sqrt(head_dim)

Query head h reads key and value head h // group_size. The gradient of a key or value is therefore the sum over the
query heads of its group: group and query position share one axis in the products, and the product sums over it. If the
cache holds float16, queries and probabilities are rounded to float16 before they are multiplied, as in ggml.

Source: arXiv:1706.03762; grouped heads arXiv:2305.13245.
"""

import math

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.precision import widen


def attention_scores(
    q: Float[np.ndarray, "seq heads head_dim"],
    k: Float[np.ndarray, "kv_heads ctx head_dim"],
    seen_from: Int[np.ndarray, " seq"] | None = None,
) -> Float[np.ndarray, "heads seq ctx"]:
    """Compute the scaled scores of every query and key, masked causally and by the window.

    Args:
        q: Rotated queries of the last `seq` tokens of the context.
        k: Rotated keys of the whole context.
        seen_from: Index of the first key that each query attends to; 0 for all if None.

    Returns:
        Scores; -inf for keys after the query or before `seen_from`.
    """
    seq, n_heads, head_dim = q.shape
    n_kv_heads, ctx, _ = k.shape
    rounded, k = like(q, k), k.astype(q.dtype, copy=False)
    grouped, keys = widen(rounded.swapaxes(0, 1).reshape(n_kv_heads, -1, head_dim), k)  # (kv_heads, group * seq, ...)
    scores = grouped / math.sqrt(head_dim) @ keys.swapaxes(1, 2)  # (kv_heads, group * seq, ctx)
    scores = scores.astype(q.dtype, copy=False).reshape(n_heads, seq, ctx)
    for i in range(seq):  # at 512 tokens three times as fast as np.where with a mask
        scores[:, i, ctx - seq + i + 1 :] = -np.inf
        if seen_from is not None:
            scores[:, i, : max(0, seen_from[i])] = -np.inf
    return scores


def attention_probs(scores: Float[np.ndarray, "heads seq ctx"]) -> Float[np.ndarray, "heads seq ctx"]:
    """Compute the softmax over the keys; each row of the masked scores has a finite entry.

    The row maximum is subtracted first, and the sum is taken in float64.
    """
    (wide_x,) = widen(scores)
    weights = wide_x - wide_x.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True, dtype=np.float64).astype(wide_x.dtype, copy=False)
    return weights.astype(scores.dtype, copy=False)


def attention_context(
    probs: Float[np.ndarray, "heads seq ctx"], v: Float[np.ndarray, "kv_heads ctx head_dim"]
) -> Float[np.ndarray, "seq q_width"]:
    """Mix the values by probability and join the heads.

    Args:
        probs: Attention probabilities.
        v: Values of the whole context.

    Returns:
        One row per token, its heads concatenated.
    """
    n_heads, seq, ctx = probs.shape
    n_kv_heads, _, head_dim = v.shape
    rounded, v = like(probs, v), v.astype(probs.dtype, copy=False)
    grouped, values = widen(rounded.reshape(n_kv_heads, -1, ctx), v)  # (kv_heads, group * seq, ctx)
    mixed = (grouped @ values).astype(probs.dtype, copy=False).reshape(n_heads, seq, head_dim)
    return mixed.swapaxes(0, 1).reshape(seq, n_heads * head_dim)


def attention_scores_backward(
    grad: Float[np.ndarray, "heads seq ctx"],
    q: Float[np.ndarray, "seq heads head_dim"],
    k: Float[np.ndarray, "kv_heads ctx head_dim"],
) -> tuple[Float[np.ndarray, "seq heads head_dim"], Float[np.ndarray, "kv_heads ctx head_dim"]]:
    """Compute the gradients by queries and keys; `grad` is 0 for masked keys, see `attention_probs_backward`."""
    seq, n_heads, head_dim = q.shape
    n_kv_heads, ctx, _ = k.shape
    by_group = q.swapaxes(0, 1).reshape(n_kv_heads, -1, head_dim)  # (kv_heads, group * seq, head_dim)
    d_scores, queries, keys = widen(grad.reshape(n_kv_heads, -1, ctx), by_group, k)
    d_scores = d_scores / math.sqrt(head_dim)
    d_q = (d_scores @ keys).reshape(n_heads, seq, head_dim).swapaxes(0, 1)  # (seq, heads, head_dim)
    d_k = d_scores.swapaxes(1, 2) @ queries  # summed over group * seq
    return d_q.astype(q.dtype, copy=False), d_k.astype(k.dtype, copy=False)


def attention_probs_backward(
    grad: Float[np.ndarray, "heads seq ctx"], probs: Float[np.ndarray, "heads seq ctx"]
) -> Float[np.ndarray, "heads seq ctx"]:
    """Compute the gradient by the scores, 0 for a masked key; it needs only the probabilities, so no -inf occurs."""
    wide_grad, wide_p = widen(grad, probs)
    mean = (wide_grad * wide_p).sum(axis=-1, keepdims=True, dtype=np.float64).astype(wide_p.dtype, copy=False)
    return (wide_p * (wide_grad - mean)).astype(probs.dtype, copy=False)


def attention_context_backward(
    grad: Float[np.ndarray, "seq q_width"],
    probs: Float[np.ndarray, "heads seq ctx"],
    v: Float[np.ndarray, "kv_heads ctx head_dim"],
) -> tuple[Float[np.ndarray, "heads seq ctx"], Float[np.ndarray, "kv_heads ctx head_dim"]]:
    """Compute the gradients by probabilities and values."""
    n_heads, seq, ctx = probs.shape
    n_kv_heads, _, head_dim = v.shape
    by_head = grad.reshape(seq, n_heads, head_dim).swapaxes(0, 1)  # (heads, seq, head_dim)
    by_group = by_head.reshape(n_kv_heads, -1, head_dim)  # (kv_heads, group * seq, head_dim)
    d_context, weights, values = widen(by_group, probs.reshape(n_kv_heads, -1, ctx), v)
    d_probs = (d_context @ values.swapaxes(1, 2)).reshape(n_heads, seq, ctx)
    d_v = weights.swapaxes(1, 2) @ d_context  # summed over group * seq
    return d_probs.astype(probs.dtype, copy=False), d_v.astype(v.dtype, copy=False)


def like(x: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """Round `x` to the dtype of the cached array and return it in the dtype of `x`."""
    return x.astype(cached.dtype, copy=False).astype(x.dtype, copy=False)
