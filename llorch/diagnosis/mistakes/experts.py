"""Mistakes of checkpoint 06b: what the router reads and makes, whose weights are used, the sum, the shared expert."""

from collections.abc import Callable

import numpy as np

from llorch.config import ModelConfig
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.ops.linear import linear
from llorch.ops.rounding import round_activations
from llorch.ops.routing import linear_by_expert, mixed, router_probs, topk_weights
from llorch.ops.sigmoid import sigmoid
from llorch.stages import BY_NAME

EXPERT_WIDE, SHARED_WIDE = ("expert_gate", "expert_up"), ("shared_ffn_gate", "shared_ffn_up")
BY_EXPERT = (*EXPERT_WIDE, "expert_out")
PROJECTIONS = {name: BY_NAME[name].matrix for name in (*BY_EXPERT, *SHARED_WIDE)}
ACTS = {name: BY_NAME[name].inputs for name in ("expert_act", "shared_ffn_act")}


def _plain(config: ModelConfig) -> bool:
    """Tell if a router is of the Qwen kind: softmax, weights on the outputs."""
    return config.experts is not None and not config.experts.scaled_inputs


def _chooses(config: ModelConfig) -> bool:
    experts = config.experts
    return experts is not None and _plain(config) and 1 < experts.n_experts_per_token < experts.n_experts


def _normalises(config: ModelConfig) -> bool:
    return _chooses(config) and config.experts is not None and config.experts.norm_topk_prob


def _keeps_probs(config: ModelConfig) -> bool:
    return _chooses(config) and config.experts is not None and not config.experts.norm_topk_prob


def _shares(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.shared_size > 0


def _gates(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.shared_gate


def _chosen(s: StageInputs) -> np.ndarray:
    return np.take_along_axis(s["router_probs"], s["topk_ids"], axis=-1)


def _k(s: StageInputs) -> int:
    assert s.config.experts is not None
    return s.config.experts.n_experts_per_token


def _n(s: StageInputs) -> int:
    assert s.config.experts is not None
    return s.config.experts.n_experts


def _right_weights(s: StageInputs) -> np.ndarray:
    return topk_weights(s["router_probs"], s["topk_ids"], normalised=_normalises(s.config))


def _ranked(s: StageInputs) -> np.ndarray:
    """Rank all experts, the most probable first."""
    return np.argsort(-s["router_probs"], axis=-1, kind="stable")


def _by_expert(s: StageInputs, stage: str, *, x: np.ndarray | None = None, ids: np.ndarray | None = None) -> np.ndarray:
    given = x if x is not None else s["expert_act" if stage == "expert_out" else "ffn_norm"]
    return linear_by_expert(given, s["topk_ids"] if ids is None else ids, s.weights[PROJECTIONS[stage]])


def _other(stage: str) -> str:
    return stage.replace("gate", "*").replace("up", "gate").replace("*", "up")


def _fused_rows_alternate(s: StageInputs, stage: str) -> np.ndarray:
    gate, up = (_by_expert(s, one) for one in EXPERT_WIDE)
    fused = np.concatenate([gate, up], axis=-1)
    return fused[..., 0::2] if stage == "expert_gate" else fused[..., 1::2]


def _gate_of_shared(s: StageInputs) -> np.ndarray:
    return sigmoid(linear(s["ffn_norm"], s.weights["shared_gate"]))


def _sum(s: StageInputs, weights: np.ndarray | None = None, *, gate: Callable | None = None) -> np.ndarray:
    """Compute the output of a mixture with other weights, or with another shared gate made from the right one."""
    shared = s["shared_out"] if _shares(s.config) else None
    right = s["shared_gate"] if _gates(s.config) else None
    return mixed(
        s["expert_out"], s["topk_weights"] if weights is None else weights, shared, gate(right) if gate else right
    )


def _lost(s: StageInputs, stage: str) -> np.ndarray:
    """Drop the least likely of the chosen experts."""
    weights = s["topk_weights"].copy()
    weights[:, -1] = 0
    return _sum(s, weights)


def _routed(s: StageInputs) -> np.ndarray:
    return mixed(s["expert_out"], s["topk_weights"])


ROUTING: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="router-input-not-normalised", stages=("router_logits",), reads=("attn_residual",),
        wrong=lambda s, _: linear(s["attn_residual"], s.weights["router"]),
        diagnosis="The router read the residual stream; it reads ffn_norm, as the experts do.",
    ),
    Mistake(
        name="router-input-of-attention", stages=("router_logits",), reads=("attn_norm",),
        wrong=lambda s, _: linear(s["attn_norm"], s.weights["router"]),
        diagnosis="The router read attn_norm; it reads ffn_norm, which comes after attention.",
    ),
    Mistake(
        name="router-sigmoid", stages=("router_probs",), wrong=lambda s, _: sigmoid(s["router_logits"]),
        diagnosis="Each logit of the router went through a sigmoid; these models take a softmax over all experts.",
    ),
    Mistake(
        name="router-softmax-over-tokens", stages=("router_probs",),
        wrong=lambda s, _: router_probs(np.ascontiguousarray(s["router_logits"].T)).T,
        diagnosis="The softmax of the router ran over the tokens; it runs over the experts of each token.",
    ),
    Mistake(
        name="router-softmax-in-bfloat16", stages=("router_probs",), rounds=True,
        wrong=lambda s, _: round_activations(router_probs(s["router_logits"]).astype(np.float32), "BF16"),
        diagnosis="The probabilities of the router were rounded to bfloat16; its softmax is float32 in every dtype.",
    ),
    Mistake(
        name="topk-one-too-far", stages=("topk_ids",), applies_to=_chooses,
        wrong=lambda s, _: _ranked(s)[:, 1 : _k(s) + 1],
        diagnosis="The experts of rank 2 to k + 1 were chosen; include the most probable expert.",
    ),
    Mistake(
        name="topk-smallest", stages=("topk_ids",), applies_to=_chooses, wrong=lambda s, _: _ranked(s)[:, -_k(s) :],
        diagnosis="The least probable experts were chosen: the order of the sort is the other way round.",
    ),
    Mistake(
        name="topk-ids-from-one", stages=("topk_ids",), applies_to=_chooses,
        wrong=lambda s, _: (_ranked(s)[:, : _k(s)] + 1) % _n(s),
        diagnosis="Experts are numbered from 0; each id is one too high.",
    ),
    Mistake(
        name="topk-weights-not-normalised", stages=("topk_weights",), applies_to=_normalises,
        wrong=lambda s, _: _chosen(s),
        diagnosis="The probabilities of the chosen experts were used as they are; norm_topk_prob divides by their sum.",
    ),
    Mistake(
        name="topk-weights-normalised", stages=("topk_weights",), applies_to=_keeps_probs,
        wrong=lambda s, _: _chosen(s) / _chosen(s).sum(axis=-1, keepdims=True),
        diagnosis="The weights sum to 1, by a division or a softmax after top-k; without norm_topk_prob they are the "
        "probabilities among all experts.",
    ),
    Mistake(
        name="topk-weights-softmax-twice", stages=("topk_weights",), applies_to=_chooses,
        wrong=lambda s, _: router_probs(_chosen(s)),
        diagnosis="A softmax was applied to probabilities; divide the chosen ones by their sum instead.",
    ),
    Mistake(
        name="topk-weights-sorted-by-id", stages=("topk_weights",), applies_to=_chooses,
        wrong=lambda s, _: np.take_along_axis(_right_weights(s), np.argsort(s["topk_ids"], axis=-1), axis=-1),
        diagnosis="The weights were sorted by id, but the ids were not, so each expert got a wrong weight.",
    ),
    Mistake(
        name="topk-weights-of-the-first-experts", stages=("topk_weights",), applies_to=_chooses,
        wrong=lambda s, _: s["router_probs"][:, : _k(s)],
        diagnosis="The probabilities of experts 0 to k - 1 were taken; gather those of the chosen ids.",
    ),
    Mistake(
        name="topk-weights-equal", stages=("topk_weights",), applies_to=_chooses,
        wrong=lambda s, _: np.full_like(_chosen(s), 1 / _k(s)),
        diagnosis="All chosen experts were given the weight 1 / k; each has its probability.",
    ),
)  # fmt: skip
CHOSEN: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="experts-input-not-normalised", stages=EXPERT_WIDE, reads=("attn_residual",), applies_to=_plain,
        wrong=lambda s, stage: _by_expert(s, stage, x=s["attn_residual"]),
        diagnosis="The experts read the residual stream; they read ffn_norm.",
    ),
    Mistake(
        name="experts-input-weighted", stages=EXPERT_WIDE, reads=("topk_weights",), applies_to=_plain,
        wrong=lambda s, stage: _by_expert(s, stage, x=s["ffn_norm"][:, None] * s["topk_weights"][..., None]),
        diagnosis="The weight multiplies what the expert reads, as in Llama 4; here it multiplies what comes out.",
    ),
    Mistake(
        name="experts-gate-and-up-swapped", stages=EXPERT_WIDE,
        wrong=lambda s, stage: _by_expert(s, _other(stage), x=s.arrays.get("expert_in")),
        diagnosis="The halves of the fused matrix of an expert were exchanged; it holds gate, then up.",
    ),
    Mistake(
        name="experts-fused-rows-alternate", stages=EXPERT_WIDE, wrong=_fused_rows_alternate, applies_to=_plain,
        diagnosis="The fused matrix of an expert was cut into even and odd rows; it holds all of gate, then all of up.",
    ),
    Mistake(
        name="experts-by-rank", stages=BY_EXPERT, applies_to=_chooses,
        wrong=lambda s, stage: _by_expert(s, stage, ids=np.argsort(np.argsort(s["topk_ids"], axis=-1), axis=-1)),
        diagnosis="The rank of a chosen expert was used as its id, so only the first k experts ran.",
    ),
    Mistake(
        name="experts-numbered-from-one", stages=BY_EXPERT, applies_to=_chooses,
        wrong=lambda s, stage: _by_expert(s, stage, ids=(s["topk_ids"] + 1) % _n(s)),
        diagnosis="The matrices of the next expert were used: ids count from 0.",
    ),
    Mistake(
        name="experts-of-the-token-before", stages=BY_EXPERT, applies_to=_chooses,
        wrong=lambda s, stage: _by_expert(s, stage, ids=np.roll(s["topk_ids"], 1, axis=0)),
        diagnosis="Each token went to the experts of its neighbour: rows were sorted by expert and not put back.",
    ),
    Mistake(
        name="experts-silu-on-up", stages=tuple(ACTS),
        wrong=lambda s, stage: s[ACTS[stage][0]] * s[ACTS[stage][1]] * sigmoid(s[ACTS[stage][1]]),
        diagnosis="SiLU was applied to up of an expert; it belongs to gate: silu(gate) * up.",
    ),
    Mistake(
        name="experts-up-missing", stages=tuple(ACTS),
        wrong=lambda s, stage: s[ACTS[stage][0]] * sigmoid(s[ACTS[stage][0]]),
        diagnosis="The result of an expert is silu(gate) alone; multiply it by up.",
    ),
    Mistake(
        name="experts-sigmoid-only", stages=tuple(ACTS),
        wrong=lambda s, stage: sigmoid(s[ACTS[stage][0]]) * s[ACTS[stage][1]],
        diagnosis="sigmoid(gate) * up of an expert was computed (GLU); SiLU is gate * sigmoid(gate).",
    ),
)  # fmt: skip
SHARED: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="shared-input-not-normalised", stages=SHARED_WIDE, reads=("attn_residual",),
        wrong=lambda s, stage: linear(s["attn_residual"], s.weights[PROJECTIONS[stage]]),
        diagnosis="The shared expert read the residual stream; it reads ffn_norm.",
    ),
    Mistake(
        name="shared-gate-and-up-swapped", stages=SHARED_WIDE,
        wrong=lambda s, stage: linear(s["ffn_norm"], s.weights[PROJECTIONS[_other(stage)]]),
        diagnosis="gate and up of the shared expert were exchanged.",
    ),
    Mistake(
        name="shared-input-gated", stages=("shared_out",), reads=("ffn_norm",), applies_to=_gates,
        wrong=lambda s, _: linear(s["shared_ffn_act"] * _gate_of_shared(s), s.weights["shared_down_proj"]),
        diagnosis="The gate was multiplied in before the last product of the shared expert, and again after it.",
    ),
    Mistake(
        name="shared-down-reads-gate", stages=("shared_out",), reads=("shared_ffn_gate",),
        wrong=lambda s, _: linear(s["shared_ffn_gate"], s.weights["shared_down_proj"]),
        diagnosis="The last product of the shared expert read gate; it reads silu(gate) * up.",
    ),
    Mistake(
        name="shared-gate-without-sigmoid", stages=("shared_gate",),
        wrong=lambda s, _: linear(s["ffn_norm"], s.weights["shared_gate"]),
        diagnosis="The gate of the shared expert is a sigmoid; its logit was used.",
    ),
    Mistake(
        name="shared-gate-silu", stages=("shared_gate",),
        wrong=lambda s, _: (z := linear(s["ffn_norm"], s.weights["shared_gate"])) * sigmoid(z),
        diagnosis="The gate of the shared expert went through SiLU; it is a sigmoid.",
    ),
    Mistake(
        name="shared-gate-of-the-residual", stages=("shared_gate",), reads=("attn_residual",),
        wrong=lambda s, _: sigmoid(linear(s["attn_residual"], s.weights["shared_gate"])),
        diagnosis="The gate of the shared expert read the residual stream; it reads ffn_norm.",
    ),
)  # fmt: skip
SUM: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="moe-shared-forgotten", stages=("moe_out",), applies_to=_shares, wrong=lambda s, _: _routed(s),
        diagnosis="The shared expert is missing in the sum.",
    ),
    Mistake(
        name="moe-shared-alone", stages=("moe_out",), applies_to=_shares,
        wrong=lambda s, _: _sum(s, np.zeros_like(s["topk_weights"])),
        diagnosis="The result is the shared expert alone; add the chosen experts.",
    ),
    Mistake(
        name="moe-shared-ungated", stages=("moe_out",), applies_to=_gates,
        wrong=lambda s, _: _sum(s, gate=np.ones_like),
        diagnosis="The shared expert was added without its gate.",
    ),
    Mistake(
        name="moe-shared-twice", stages=("moe_out",), applies_to=_gates,
        wrong=lambda s, _: _sum(s, gate=lambda g: 2 * g),
        diagnosis="The shared expert was added twice, perhaps in the loop over ranks or halves.",
    ),
    Mistake(
        name="moe-shared-gate-the-other-way", stages=("moe_out",), applies_to=_gates,
        wrong=lambda s, _: _sum(s, gate=lambda g: 1 - g),
        diagnosis="The shared expert was multiplied by 1 - gate.",
    ),
    Mistake(
        name="moe-gate-on-all", stages=("moe_out",), applies_to=_gates,
        wrong=lambda s, _: (_routed(s) + s["shared_out"]) * s["shared_gate"],
        diagnosis="The gate also multiplied the chosen experts; it belongs to the shared expert only.",
    ),
    Mistake(
        name="moe-unweighted", stages=("moe_out",), applies_to=_chooses,
        wrong=lambda s, _: _sum(s, np.ones_like(s["topk_weights"])),
        diagnosis="The outputs of the chosen experts were added without their weights.",
    ),
    Mistake(
        name="moe-averaged", stages=("moe_out",), applies_to=_chooses,
        wrong=lambda s, _: _sum(s, s["topk_weights"] / s.dtype(_k(s))),
        diagnosis="The weighted sum of the experts was divided by their number.",
    ),
    Mistake(
        name="moe-weights-reversed", stages=("moe_out",), applies_to=_chooses,
        wrong=lambda s, _: _sum(s, s["topk_weights"][:, ::-1]),
        diagnosis="The weights stood in the reverse order of the experts.",
    ),
    Mistake(
        name="moe-weights-twice", stages=("moe_out",), applies_to=_chooses,
        wrong=lambda s, _: _sum(s, np.square(s["topk_weights"])),
        diagnosis="The weights were multiplied in twice.",
    ),
    Mistake(
        name="moe-last-expert-lost", stages=("moe_out",), applies_to=_chooses, wrong=_lost,
        diagnosis="The last of the chosen experts is missing in the sum: one add too few.",
    ),
)  # fmt: skip
EXPERTS: tuple[Mistake[StageInputs], ...] = (*ROUTING, *CHOSEN, *SHARED, *SUM)
