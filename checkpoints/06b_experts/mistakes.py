"""Wrong code for a mixture of experts, by the name of the known mistake.

The page plants one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def never_normalised(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    return np.take_along_axis(probs, ids, axis=1)


def each_expert(h, ids, gate_proj, up_proj, down_proj, *, chosen=None, act=lambda gate, up: silu(gate) * up):
    """Compute the experts one token at a time."""
    chosen = ids if chosen is None else chosen
    outs = np.zeros((*ids.shape, h.shape[1]), h.dtype)
    for t, row in enumerate(chosen):
        for j, e in enumerate(row):
            outs[t, j] = act(h[t] @ gate_proj[e].T, h[t] @ up_proj[e].T) @ down_proj[e].T
    return outs


def up_forgotten(h, ids, gate_proj, up_proj, down_proj):
    return each_expert(h, ids, gate_proj, up_proj, down_proj, act=lambda gate, up: silu(gate))


def sigmoid_for_silu(h, ids, gate_proj, up_proj, down_proj):
    return each_expert(h, ids, gate_proj, up_proj, down_proj, act=lambda gate, up: up / (1 + np.exp(-gate)))


def rows_take_turns(h, ids, gate_proj, up_proj, down_proj):
    fused = np.concatenate([gate_proj, up_proj], axis=1)
    return each_expert(h, ids, fused[:, 0::2], fused[:, 1::2], down_proj)


WRONG = {
    "topk_weights": {
        "topk-weights-not-normalised": never_normalised,
    },
    "expert_outputs": {
        "experts-up-missing": up_forgotten,
        "experts-sigmoid-only": sigmoid_for_silu,
        "experts-fused-rows-alternate": rows_take_turns,
    },
}
_ROUTER = "the logits and the softmax of the router are a product and a softmax of lessons 02 and 04"
_INPUT = "what an expert reads is decided by the page that calls it"
_SHARED = "the shared expert is the feed-forward part of lesson 06"
UNTYPED = {
    "router-input-not-normalised": _INPUT,
    "router-input-of-attention": _INPUT,
    "router-sigmoid": _ROUTER,
    "router-softmax-over-tokens": _ROUTER,
    "router-softmax-in-bfloat16": _ROUTER,
    "experts-input-not-normalised": _INPUT,
    "experts-input-weighted": _INPUT,
    "experts-silu-on-up": "it makes the same numbers as exchanged matrices, which are typed",
    "shared-input-not-normalised": _INPUT,
    "shared-gate-and-up-swapped": _SHARED,
    "shared-input-gated": _SHARED,
    "shared-down-reads-gate": _SHARED,
    "shared-gate-without-sigmoid": "the reference implementation makes the gate",
    "shared-gate-silu": "the reference implementation makes the gate",
    "shared-gate-of-the-residual": _INPUT,
}
