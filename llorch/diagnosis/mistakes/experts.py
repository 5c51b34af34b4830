"""Known mistakes in mixture-of-experts layers: the router, selected experts, their weighted sum, the shared expert.

Module `mistake` explains the fields. A mistake applies only to models with its stages; `applies_to` excludes others.
"""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.feed_forward import gate_and_up_swapped
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import Function, Replacement, instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig
from llorch.ops.linear import linear
from llorch.ops.rounding import round_activations
from llorch.ops.routing import linear_by_expert, router_probs
from llorch.ops.sigmoid import sigmoid
from llorch.stages.table import BY_NAME

EXPERT_GATE_UP, SHARED_GATE_UP = ("expert_gate", "expert_up"), ("shared_ffn_gate", "shared_ffn_up")
BY_EXPERT = (*EXPERT_GATE_UP, "expert_out")
# Values of `part`: functions that `wrong` replaces, see `in_stage`. Without `part`, `wrong` computes a stage from `s`.
CHOICE, WEIGHTS, OUTPUTS, SUMS = "top_k", "topk_weights", "expert_outputs", "mixed"
PROJECTIONS = {name: BY_NAME[name].matrix for name in (*BY_EXPERT, *SHARED_GATE_UP)}
ACTS = {name: BY_NAME[name].inputs for name in ("expert_act", "shared_ffn_act")}  # -> (gate, up), both kinds of expert


def _is_qwen(config: ModelConfig) -> bool:
    """Tell if the router is like Qwen's: softmax, weights multiply the experts' outputs."""
    return config.experts is not None and not config.experts.scaled_inputs


def _selects(config: ModelConfig) -> bool:
    """Tell if a router like Qwen's selects more than one expert, but not all."""
    experts = config.experts
    return experts is not None and _is_qwen(config) and 1 < experts.n_experts_per_token < experts.n_experts


def _normalises(config: ModelConfig) -> bool:
    """Tell if `_selects` holds and the selected weights are normalised to sum 1."""
    return _selects(config) and config.experts is not None and config.experts.norm_topk_prob


def _keeps_probs(config: ModelConfig) -> bool:
    """Tell if `_selects` holds and the selected probabilities are the weights."""
    return _selects(config) and config.experts is not None and not config.experts.norm_topk_prob


def _has_shared(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.shared_size > 0


def _has_gate(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.shared_gate


def _chosen_probs(probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(probs, ids, axis=-1)


def _with_ids(change: Callable[[np.ndarray, int], np.ndarray]) -> Replacement:
    """Make the replacement that runs other experts; `change` maps the right ids and the number of experts to ids.

    The replaced function computes one of the stages `BY_EXPERT` from h, ids, gate_proj, up_proj and down_proj.
    """
    return lambda right: lambda **kwargs: right(**kwargs | {"ids": change(kwargs["ids"], len(kwargs["gate_proj"]))})


def sorted_by_id(right: Function) -> Function:
    """Sort the weights, but not the ids, by id."""

    def wrong(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
        return np.take_along_axis(right(probs, ids, normalised=normalised), np.argsort(ids, axis=-1), axis=-1)

    return wrong


def shared_alone(right: Function) -> Function:
    """Return the shared expert without the selected experts, if there is a shared expert."""
    return lambda outs, weights, shared, gate: right(
        outs, weights if shared is None else np.zeros_like(weights), shared, gate
    )


def _ids_by_probability(scores: np.ndarray) -> np.ndarray:
    """List the ids of all experts, the most probable first."""
    return np.argsort(-scores, axis=-1, kind="stable")


def _by_expert(s: StageInputs, stage: str, *, x: np.ndarray | None = None) -> np.ndarray:
    """Compute an expert projection of `x`, or of the usual input, with each token's selected experts."""
    return linear_by_expert(s["ffn_norm"] if x is None else x, s["topk_ids"], s.weights[PROJECTIONS[stage]])


def _swap_gate_up(stage: str) -> str:
    """Exchange gate and up in the name of a stage."""
    return stage.replace("gate", "*").replace("up", "gate").replace("*", "up")


def _fused_rows_alternate(s: StageInputs, stage: str) -> np.ndarray:
    gate, up = (_by_expert(s, name) for name in EXPERT_GATE_UP)
    fused = np.concatenate([gate, up], axis=-1)
    return fused[..., 0::2] if stage == "expert_gate" else fused[..., 1::2]


def _shared_gate(s: StageInputs) -> np.ndarray:
    """Compute the gate, because its stage comes after `shared_out`."""
    return sigmoid(linear(s["ffn_norm"], s.weights["shared_gate"]))


def _reweight(change: Callable[[np.ndarray], np.ndarray]) -> Replacement:
    """Make the replacement that sums the experts with changed weights."""
    return lambda right: lambda outs, weights, shared, gate: right(outs, change(weights), shared, gate)


def _with_gate(change: Callable[[np.ndarray], np.ndarray]) -> Replacement:
    """Make the replacement that changes the gate of the shared expert."""
    return lambda right: (
        lambda outs, weights, shared, gate: right(outs, weights, shared, None if gate is None else change(gate))
    )


def _drop_last(weights: np.ndarray) -> np.ndarray:
    """Set the weight of the least probable selected expert to 0."""
    weights = weights.copy()
    weights[:, -1] = 0
    return weights


def gate_on_all(right: Function) -> Function:
    """Multiply the selected experts by the gate of the shared expert too."""

    def wrong(outs: np.ndarray, weights: np.ndarray, shared: np.ndarray | None, gate: np.ndarray | None) -> np.ndarray:
        total = right(outs, weights, None, None) + (0 if shared is None else shared)
        return total if gate is None else total * gate

    return wrong


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
        name="topk-one-too-far", stages=("topk_ids",), applies_to=_selects, part=CHOICE,
        wrong=instead(lambda scores, k: _ids_by_probability(scores)[:, 1 : k + 1]),
        diagnosis="The experts of rank 2 to k + 1 were chosen; include the most probable expert.",
    ),
    Mistake(
        name="topk-smallest", stages=("topk_ids",), applies_to=_selects, part=CHOICE,
        wrong=instead(lambda scores, k: _ids_by_probability(scores)[:, -k:]),
        diagnosis="The least probable experts were chosen: the order of the sort is the other way round.",
    ),
    Mistake(
        name="topk-ids-from-one", stages=("topk_ids",), applies_to=_selects, part=CHOICE,
        wrong=instead(lambda scores, k: (_ids_by_probability(scores)[:, :k] + 1) % scores.shape[-1]),
        diagnosis="Experts are numbered from 0; each id is one too high.",
    ),
    Mistake(
        name="topk-weights-not-normalised", stages=("topk_weights",), applies_to=_normalises, part=WEIGHTS,
        wrong=instead(lambda probs, ids, normalised: _chosen_probs(probs, ids)),
        diagnosis="The probabilities of the chosen experts were used as they are; norm_topk_prob divides by their sum.",
    ),
    Mistake(
        name="topk-weights-normalised", stages=("topk_weights",), applies_to=_keeps_probs, part=WEIGHTS,
        wrong=instead(lambda probs, ids, normalised: (p := _chosen_probs(probs, ids)) / p.sum(axis=-1, keepdims=True)),
        diagnosis="The weights sum to 1, by a division or a softmax after top-k; without norm_topk_prob they are the "
        "probabilities among all experts.",
    ),
    Mistake(
        name="topk-weights-softmax-twice", stages=("topk_weights",), applies_to=_selects, part=WEIGHTS,
        wrong=instead(lambda probs, ids, normalised: router_probs(_chosen_probs(probs, ids))),
        diagnosis="A softmax was applied to probabilities; divide the chosen ones by their sum instead.",
    ),
    Mistake(
        name="topk-weights-sorted-by-id", stages=("topk_weights",), applies_to=_selects, part=WEIGHTS,
        wrong=sorted_by_id,
        diagnosis="The weights were sorted by id, but the ids were not, so each expert got a wrong weight.",
    ),
    Mistake(
        name="topk-weights-of-the-first-experts", stages=("topk_weights",), applies_to=_selects, part=WEIGHTS,
        wrong=instead(lambda probs, ids, normalised: probs[:, : ids.shape[1]]),
        diagnosis="The probabilities of experts 0 to k - 1 were taken; gather those of the chosen ids.",
    ),
    Mistake(
        name="topk-weights-equal", stages=("topk_weights",), applies_to=_selects, part=WEIGHTS,
        wrong=instead(lambda probs, ids, normalised: np.full(ids.shape, 1 / ids.shape[1], probs.dtype)),
        diagnosis="All chosen experts were given the weight 1 / k; each has its probability.",
    ),
)  # fmt: skip
CHOSEN: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="experts-input-not-normalised", stages=EXPERT_GATE_UP, reads=("attn_residual",), applies_to=_is_qwen,
        wrong=lambda s, stage: _by_expert(s, stage, x=s["attn_residual"]),
        diagnosis="The experts read the residual stream; they read ffn_norm.",
    ),
    Mistake(
        name="experts-input-weighted", stages=EXPERT_GATE_UP, reads=("topk_weights",), applies_to=_is_qwen,
        wrong=lambda s, stage: _by_expert(s, stage, x=s["ffn_norm"][:, None] * s["topk_weights"][..., None]),
        diagnosis="The weight multiplies what the expert reads, as in Llama 4; here it multiplies what comes out.",
    ),
    Mistake(
        name="experts-gate-and-up-swapped", stages=EXPERT_GATE_UP, part=OUTPUTS, wrong=gate_and_up_swapped,
        diagnosis="The halves of the fused matrix of an expert were exchanged; it holds gate, then up.",
    ),
    Mistake(
        name="experts-fused-rows-alternate", stages=EXPERT_GATE_UP, wrong=_fused_rows_alternate, applies_to=_is_qwen,
        diagnosis="The fused matrix of an expert was cut into even and odd rows; it holds all of gate, then all of up.",
    ),
    Mistake(
        name="experts-by-rank", stages=BY_EXPERT, applies_to=_selects, part=OUTPUTS,
        wrong=_with_ids(lambda ids, n_experts: np.argsort(np.argsort(ids, axis=-1), axis=-1)),  # order by id
        diagnosis="The rank of a chosen expert was used as its id, so only the first k experts ran.",
    ),
    Mistake(
        name="experts-numbered-from-one", stages=BY_EXPERT, applies_to=_selects, part=OUTPUTS,
        wrong=_with_ids(lambda ids, n_experts: (ids + 1) % n_experts),
        diagnosis="The matrices of the next expert were used: ids count from 0.",
    ),
    Mistake(
        name="experts-of-the-token-before", stages=BY_EXPERT, applies_to=_selects, part=OUTPUTS,
        wrong=_with_ids(lambda ids, n_experts: np.roll(ids, 1, axis=0)),
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
        name="shared-input-not-normalised", stages=SHARED_GATE_UP, reads=("attn_residual",),
        wrong=lambda s, stage: linear(s["attn_residual"], s.weights[PROJECTIONS[stage]]),
        diagnosis="The shared expert read the residual stream; it reads ffn_norm.",
    ),
    Mistake(
        name="shared-gate-and-up-swapped", stages=SHARED_GATE_UP,
        wrong=lambda s, stage: linear(s["ffn_norm"], s.weights[PROJECTIONS[_swap_gate_up(stage)]]),
        diagnosis="gate and up of the shared expert were exchanged.",
    ),
    Mistake(
        name="shared-input-gated", stages=("shared_out",), reads=("ffn_norm",), applies_to=_has_gate,
        wrong=lambda s, _: linear(s["shared_ffn_act"] * _shared_gate(s), s.weights["shared_down_proj"]),
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
        name="moe-shared-forgotten", stages=("moe_out",), applies_to=_has_shared, part=SUMS,
        wrong=lambda right: lambda outs, weights, shared, gate: right(outs, weights, None, None),
        diagnosis="The shared expert is missing in the sum.",
    ),
    Mistake(
        name="moe-shared-alone", stages=("moe_out",), applies_to=_has_shared, part=SUMS, wrong=shared_alone,
        diagnosis="The result is the shared expert alone; add the chosen experts.",
    ),
    Mistake(
        name="moe-shared-ungated", stages=("moe_out",), applies_to=_has_gate, part=SUMS, wrong=_with_gate(np.ones_like),
        diagnosis="The shared expert was added without its gate.",
    ),
    Mistake(
        name="moe-shared-twice", stages=("moe_out",), applies_to=_has_gate, part=SUMS,
        wrong=_with_gate(lambda gate: 2 * gate),
        diagnosis="The shared expert was added twice, perhaps in the loop over ranks or halves.",
    ),
    Mistake(
        name="moe-shared-gate-the-other-way", stages=("moe_out",), applies_to=_has_gate, part=SUMS,
        wrong=_with_gate(lambda gate: 1 - gate),
        diagnosis="The shared expert was multiplied by 1 - gate.",
    ),
    Mistake(
        name="moe-gate-on-all", stages=("moe_out",), applies_to=_has_gate, part=SUMS, wrong=gate_on_all,
        diagnosis="The gate also multiplied the chosen experts; it belongs to the shared expert only.",
    ),
    Mistake(
        name="moe-unweighted", stages=("moe_out",), applies_to=_selects, part=SUMS, wrong=_reweight(np.ones_like),
        diagnosis="The outputs of the chosen experts were added without their weights.",
    ),
    Mistake(
        name="moe-averaged", stages=("moe_out",), applies_to=_selects, part=SUMS,
        wrong=_reweight(lambda weights: weights / weights.dtype.type(weights.shape[1])),
        diagnosis="The weighted sum of the experts was divided by their number.",
    ),
    Mistake(
        name="moe-weights-reversed", stages=("moe_out",), applies_to=_selects, part=SUMS,
        wrong=_reweight(lambda weights: weights[:, ::-1]),
        diagnosis="The weights stood in the reverse order of the experts.",
    ),
    Mistake(
        name="moe-weights-twice", stages=("moe_out",), applies_to=_selects, part=SUMS, wrong=_reweight(np.square),
        diagnosis="The weights were multiplied in twice.",
    ),
    Mistake(
        name="moe-last-expert-lost", stages=("moe_out",), applies_to=_selects, part=SUMS, wrong=_reweight(_drop_last),
        diagnosis="The last of the chosen experts is missing in the sum: one add too few.",
    ),
)  # fmt: skip
EXPERTS: tuple[Mistake[StageInputs], ...] = (*ROUTING, *CHOSEN, *SHARED, *SUM)
