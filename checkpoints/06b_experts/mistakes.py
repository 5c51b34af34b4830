"""Wrong code for a mixture of experts, by the name of the known mistake."""

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def never_normalised(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    return np.take_along_axis(probs, ids, axis=1)


def each_expert(h, ids, gate_proj, up_proj, down_proj, *, chosen=None, act=lambda gate, up: silu(gate) * up):
    """One token after the other."""
    chosen = ids if chosen is None else chosen
    outs = np.zeros((*ids.shape, h.shape[1]), h.dtype)
    for t, row in enumerate(chosen):
        for j, e in enumerate(row):
            outs[t, j] = act(h[t] @ gate_proj[e].T, h[t] @ up_proj[e].T) @ down_proj[e].T
    return outs


def place_for_id(h, ids, gate_proj, up_proj, down_proj):
    places = np.argsort(np.argsort(ids, axis=1), axis=1)  # "the j-th of the chosen"
    return each_expert(h, ids, gate_proj, up_proj, down_proj, chosen=places)


def next_expert(h, ids, gate_proj, up_proj, down_proj):
    return each_expert(h, ids, gate_proj, up_proj, down_proj, chosen=(ids + 1) % len(gate_proj))


def not_put_back(h, ids, gate_proj, up_proj, down_proj):
    return each_expert(h, ids, gate_proj, up_proj, down_proj, chosen=np.roll(ids, 1, axis=0))


def gate_and_up_exchanged(h, ids, gate_proj, up_proj, down_proj):
    return each_expert(h, ids, up_proj, gate_proj, down_proj)


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
        "experts-by-rank": place_for_id,
        "experts-numbered-from-one": next_expert,
        "experts-of-the-token-before": not_put_back,
        "experts-gate-and-up-swapped": gate_and_up_exchanged,
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
