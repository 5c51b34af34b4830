"""Wrong code for a mixture of experts, by the name of the known mistake."""

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rank_two_and_on(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1)[:, 1 : k + 1]


def ascending(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(scores, axis=-1)[:, :k]


def ids_from_one(scores: np.ndarray, k: int) -> np.ndarray:
    return (np.argsort(-scores, axis=-1)[:, :k] + 1) % scores.shape[-1]


def never_normalised(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    return np.take_along_axis(probs, ids, axis=1)


def always_normalised(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    weights = np.take_along_axis(probs, ids, axis=1)
    return weights / weights.sum(axis=1, keepdims=True)


def softmax_of_probabilities(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    weights = np.exp(np.take_along_axis(probs, ids, axis=1))
    return weights / weights.sum(axis=1, keepdims=True)


def in_order_of_ids(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    weights = np.take_along_axis(probs, np.sort(ids, axis=1), axis=1)
    return weights / weights.sum(axis=1, keepdims=True) if normalised else weights


def first_columns(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    return probs[:, : ids.shape[1]]


def all_alike(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    return np.ones(ids.shape, probs.dtype) / ids.shape[1]


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


def weighted(outs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.einsum("tk,tkd->td", weights, outs)


def opened(shared: np.ndarray | None, gate: np.ndarray | None):
    return 0 if shared is None else shared if gate is None else gate * shared


def shared_left_out(outs, weights, shared, gate):
    return weighted(outs, weights)


def shared_alone(outs, weights, shared, gate):
    return weighted(outs, weights) if shared is None else shared if gate is None else gate * shared


def gate_left_out(outs, weights, shared, gate):
    return weighted(outs, weights) + (0 if shared is None else shared)


def shared_in_the_loop(outs, weights, shared, gate):
    return weighted(outs, weights) + 2 * opened(shared, gate)


def gate_the_other_way(outs, weights, shared, gate):
    return weighted(outs, weights) + opened(shared, None if gate is None else 1 - gate)


def gate_on_the_sum(outs, weights, shared, gate):
    y = weighted(outs, weights) + (0 if shared is None else shared)
    return y if gate is None else gate * y


def weights_left_out(outs, weights, shared, gate):
    return outs.sum(axis=1) + opened(shared, gate)


def mean_of_experts(outs, weights, shared, gate):
    return (weights[:, :, None] * outs).mean(axis=1) + opened(shared, gate)


def weights_backwards(outs, weights, shared, gate):
    return weighted(outs, weights[:, ::-1]) + opened(shared, gate)


def weighted_twice(outs, weights, shared, gate):
    return weighted(outs, weights * weights) + opened(shared, gate)


def one_add_too_few(outs, weights, shared, gate):
    return weighted(outs[:, :-1], weights[:, :-1]) + opened(shared, gate)


WRONG = {
    "top_k": {
        "topk-one-too-far": rank_two_and_on,
        "topk-smallest": ascending,
        "topk-ids-from-one": ids_from_one,
    },
    "topk_weights": {
        "topk-weights-not-normalised": never_normalised,
        "topk-weights-normalised": always_normalised,
        "topk-weights-softmax-twice": softmax_of_probabilities,
        "topk-weights-sorted-by-id": in_order_of_ids,
        "topk-weights-of-the-first-experts": first_columns,
        "topk-weights-equal": all_alike,
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
    "mixed": {
        "moe-shared-forgotten": shared_left_out,
        "moe-shared-alone": shared_alone,
        "moe-shared-ungated": gate_left_out,
        "moe-shared-twice": shared_in_the_loop,
        "moe-shared-gate-the-other-way": gate_the_other_way,
        "moe-gate-on-all": gate_on_the_sum,
        "moe-unweighted": weights_left_out,
        "moe-averaged": mean_of_experts,
        "moe-weights-reversed": weights_backwards,
        "moe-weights-twice": weighted_twice,
        "moe-last-expert-lost": one_add_too_few,
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
