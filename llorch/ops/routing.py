"""Mixture of experts: select experts for each token, project by expert, and sum their weighted outputs.

    p = softmax(logits), over all experts
    ids = experts with the k largest p; of equal ones the lowest id first
    weights = p[ids], divided by their sum if the config has norm_topk_prob
    y = sum(weights[j] * out[j]) + gate * shared

    dL/dp[ids]   = dL/dweights, or (dL/dweights - sum(dL/dweights * weights)) / sum(p[ids]) where normalised; else 0
    dL/dlogits   = p * (dL/dp - sum(dL/dp * p)), also for experts that were not selected
    dL/dout[j]   = weights[j] dL/dy         dL/dweights[j] = sum(dL/dy * out[j])         dL/dgate = sum(dL/dy * shared)

The ids are constants: a small change of a logit changes none of them.

llama.cpp sorts all probabilities and transformers takes a top-k; neither defines the order of equal ones.

Source: arXiv:2101.03961; Qwen3 normalises the weights, Qwen2 does not.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.attention import attention_probs, attention_probs_backward
from llorch.ops.linear import linear
from llorch.ops.numerics import QuantMethod
from llorch.ops.precision import widen


def router_probs(logits: Float[np.ndarray, "seq experts"]) -> Float[np.ndarray, "seq experts"]:
    """Compute the softmax over all experts."""
    return attention_probs(logits[None])[0]


def top_k(scores: Float[np.ndarray, "seq experts"], k: int) -> Int[np.ndarray, "seq topk"]:
    """Pick the experts with the largest scores, the largest first; of equal ones the lowest id."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def topk_weights(
    probs: Float[np.ndarray, "seq experts"], ids: Int[np.ndarray, "seq topk"], *, normalised: bool
) -> Float[np.ndarray, "seq topk"]:
    """Take the probabilities of the selected experts; `normalised` divides them by their sum."""
    weights = np.take_along_axis(probs, ids, axis=-1)
    if not normalised:
        return weights
    (wide_weights,) = widen(weights)
    return (wide_weights / wide_weights.sum(axis=-1, keepdims=True)).astype(weights.dtype, copy=False)


def router_probs_backward(
    grad: Float[np.ndarray, "seq experts"], probs: Float[np.ndarray, "seq experts"]
) -> Float[np.ndarray, "seq experts"]:
    """Compute the gradient by the logits of all experts."""
    return attention_probs_backward(grad[None], probs[None])[0]


def topk_weights_backward(
    grad: Float[np.ndarray, "seq topk"],
    probs: Float[np.ndarray, "seq experts"],
    ids: Int[np.ndarray, "seq topk"],
    *,
    normalised: bool,
) -> Float[np.ndarray, "seq experts"]:
    """Compute the gradient by all probabilities, 0 for experts that were not selected."""
    wide_grad, wide_probs = widen(grad, np.take_along_axis(probs, ids, axis=-1))
    if normalised:
        total = wide_probs.sum(axis=-1, keepdims=True)
        wide_grad = (wide_grad - (wide_grad * wide_probs / total).sum(axis=-1, keepdims=True)) / total
    return spread(wide_grad.astype(probs.dtype, copy=False), ids, n_experts=probs.shape[1])


def spread(
    selected: Float[np.ndarray, "seq topk"], ids: Int[np.ndarray, "seq topk"], *, n_experts: int
) -> Float[np.ndarray, "seq experts"]:
    """Scatter one number per selected expert into a row of all experts; the others get 0."""
    all_experts = np.zeros((len(ids), n_experts), selected.dtype)
    np.put_along_axis(all_experts, ids, selected, axis=-1)
    return all_experts


def linear_by_expert(
    x: Float[np.ndarray, "seq in"] | Float[np.ndarray, "seq topk in"],
    ids: Int[np.ndarray, "seq topk"],
    weights: Sequence[Float[np.ndarray, "out in"] | QuantMethod] | Float[np.ndarray, "experts out in"],
) -> Float[np.ndarray, "seq topk out"]:
    """Project each row by each of its experts; the matrix of an unselected expert is not read.

    Args:
        x: Activations, one row per token or one per (token, selected expert).
        ids: The experts of each token.
        weights: The matrix of each expert.

    Returns:
        The projected activations, in the order of `ids`.
    """
    k, expert_ids = ids.shape[1], ids.reshape(-1)
    order = np.argsort(expert_ids, kind="stable")  # (token, expert) pairs by expert
    starts = np.flatnonzero(np.diff(expert_ids[order], prepend=-1))
    y = np.empty((len(expert_ids), weights[0].shape[0]), x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    for pairs in np.split(order, starts[1:]):
        y[pairs] = linear(rows[pairs if x.ndim == 3 else pairs // k], weights[int(expert_ids[pairs[0]])])
    return y.reshape(*ids.shape, -1)


def mixed(
    outs: Float[np.ndarray, "seq topk hidden"],
    weights: Float[np.ndarray, "seq topk"],
    shared: Float[np.ndarray, "seq hidden"] | None = None,
    gate: Float[np.ndarray, "seq 1"] | None = None,
) -> Float[np.ndarray, "seq hidden"]:
    """Sum the weighted outputs of each token's experts, and add the shared expert, times its gate if it has one.

    Args:
        outs: Outputs of the selected experts.
        weights: Weights of the selected experts.
        shared: Output of the shared expert, which every token uses.
        gate: Gate of the shared expert; 1 if None.

    Returns:
        One row for each token.
    """
    wide_outs, wide_weights = widen(outs, weights)
    y = (wide_weights[:, None] @ wide_outs)[:, 0]
    if shared is not None:
        y += shared if gate is None else gate.astype(y.dtype, copy=False) * shared
    return y.astype(outs.dtype, copy=False)


def mixed_backward(
    grad: Float[np.ndarray, "seq hidden"],
    outs: Float[np.ndarray, "seq topk hidden"],
    weights: Float[np.ndarray, "seq topk"],
) -> tuple[Float[np.ndarray, "seq topk hidden"], Float[np.ndarray, "seq topk"]]:
    """Compute the gradients by the outputs of the selected experts and by their weights."""
    wide_grad, wide_outs, wide_weights = widen(grad, outs, weights)
    d_outs, d_weights = wide_weights[..., None] * wide_grad[:, None], (wide_outs @ wide_grad[..., None])[..., 0]
    return d_outs.astype(outs.dtype, copy=False), d_weights.astype(weights.dtype, copy=False)
