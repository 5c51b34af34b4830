"""Routing: which experts a token is given to, what each of them makes of it, and the sum of that.

    p = softmax(logits), over all experts
    ids = those of the k largest p, the lowest id first where some are equal
    weights = p[ids], divided by their sum where the model says so
    y = sum(weights[j] * out[j]) + gate * shared

    dL/dp[ids]   = dL/dweights, or (dL/dweights - sum(dL/dweights * weights)) / sum(p[ids]) where normalised; else 0
    dL/dlogits   = p * (dL/dp - sum(dL/dp * p)), also of experts that were not chosen
    dL/dout[j]   = weights[j] dL/dy         dL/dweights[j] = sum(dL/dy * out[j])         dL/dgate = sum(dL/dy * shared)

The ids are constants: a small change of a logit changes none of them.

llama.cpp sorts all probabilities, transformers selects the largest: neither promises an order of equal ones.

Source: arXiv:2101.03961; the models of Qwen normalise (Qwen3) or not (Qwen2).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.attention import attention_probs, attention_probs_backward
from llorch.ops.linear import linear
from llorch.ops.numerics import QuantMethod
from llorch.ops.precision import widen


def router_probs(logits: Float[np.ndarray, "seq experts"]) -> Float[np.ndarray, "seq experts"]:
    """Softmax over all experts."""
    return attention_probs(logits[None])[0]


def top_k(scores: Float[np.ndarray, "seq experts"], k: int) -> Int[np.ndarray, "seq topk"]:
    """Pick the experts with the largest scores, the largest first; of equal ones the lowest id."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def topk_weights(
    probs: Float[np.ndarray, "seq experts"], ids: Int[np.ndarray, "seq topk"], *, normalised: bool
) -> Float[np.ndarray, "seq topk"]:
    """Pick the probabilities of the chosen experts; `normalised` to a sum of 1."""
    weights = np.take_along_axis(probs, ids, axis=-1)
    if not normalised:
        return weights
    (wide,) = widen(weights)
    return (wide / wide.sum(axis=-1, keepdims=True)).astype(weights.dtype, copy=False)


def router_probs_backward(
    grad: Float[np.ndarray, "seq experts"], probs: Float[np.ndarray, "seq experts"]
) -> Float[np.ndarray, "seq experts"]:
    """Gradient by the logits of all experts."""
    return attention_probs_backward(grad[None], probs[None])[0]


def topk_weights_backward(
    grad: Float[np.ndarray, "seq topk"],
    probs: Float[np.ndarray, "seq experts"],
    ids: Int[np.ndarray, "seq topk"],
    *,
    normalised: bool,
) -> Float[np.ndarray, "seq experts"]:
    """Gradient by all probabilities, 0 where an expert was not chosen."""
    wide_grad, wide = widen(grad, np.take_along_axis(probs, ids, axis=-1))
    if normalised:
        total = wide.sum(axis=-1, keepdims=True)
        wide_grad = (wide_grad - (wide_grad * wide / total).sum(axis=-1, keepdims=True)) / total
    return spread(wide_grad.astype(probs.dtype, copy=False), ids, n_experts=probs.shape[1])


def spread(
    of_chosen: Float[np.ndarray, "seq topk"], ids: Int[np.ndarray, "seq topk"], *, n_experts: int
) -> Float[np.ndarray, "seq experts"]:
    """Numbers of the chosen experts among those of all, which have 0."""
    of_all = np.zeros((len(ids), n_experts), of_chosen.dtype)
    np.put_along_axis(of_all, ids, of_chosen, axis=-1)
    return of_all


def linear_by_expert(
    x: Float[np.ndarray, "seq in"] | Float[np.ndarray, "seq topk in"],
    ids: Int[np.ndarray, "seq topk"],
    weights: Sequence[Float[np.ndarray, "out in"] | QuantMethod] | Float[np.ndarray, "experts out in"],
) -> Float[np.ndarray, "seq topk out"]:
    """Project each row by each of its experts; an expert that nobody chose is not touched.

    Args:
        x: Activations of a token, the same for all of its experts or one for each.
        ids: The experts of each token.
        weights: The matrix of each expert.

    Returns:
        The projected activations, in the order of `ids`.
    """
    k, chosen = ids.shape[1], ids.reshape(-1)
    order = np.argsort(chosen, kind="stable")  # places in `chosen`, expert by expert
    starts = np.flatnonzero(np.diff(chosen[order], prepend=-1))
    y = np.empty((len(chosen), weights[0].shape[0]), x.dtype)
    by_place = x.reshape(-1, x.shape[-1])
    for places in np.split(order, starts[1:]):
        y[places] = linear(by_place[places if x.ndim == 3 else places // k], weights[int(chosen[places[0]])])
    return y.reshape(*ids.shape, -1)


def mixed(
    outs: Float[np.ndarray, "seq topk hidden"],
    weights: Float[np.ndarray, "seq topk"],
    shared: Float[np.ndarray, "seq hidden"] | None = None,
    gate: Float[np.ndarray, "seq 1"] | None = None,
) -> Float[np.ndarray, "seq hidden"]:
    """Sum what the experts of each token made of it; the shared one counts as far as its gate is open, if it has one.

    Args:
        outs: Of each chosen expert.
        weights: Of each.
        shared: Of the expert that every token has.
        gate: Of that; 1 if None.

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
    """Gradients by what the chosen experts made and by their weights."""
    wide_grad, wide_outs, wide_weights = widen(grad, outs, weights)
    d_outs, d_weights = wide_weights[..., None] * wide_grad[:, None], (wide_outs @ wide_grad[..., None])[..., 0]
    return d_outs.astype(outs.dtype, copy=False), d_weights.astype(weights.dtype, copy=False)
