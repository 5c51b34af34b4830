"""Parts of the families that are not dense: the delta rule and its surroundings, the choice of experts and their sum.

Lessons 05b and 06b. As in `llorch.apps.learn.exercises.forward`, ours are imported under other names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.exercises.forward import Array, dense
from llorch.ops.delta_rule import delta_rule as our_delta_rule
from llorch.ops.delta_rule import l2_norm as our_l2_norm
from llorch.ops.delta_rule import log_decay as our_log_decay
from llorch.ops.routing import linear_by_expert as our_linear_by_expert
from llorch.ops.routing import mixed as our_mixed
from llorch.ops.routing import top_k as our_top_k
from llorch.ops.routing import topk_weights as our_topk_weights
from llorch.ops.short_conv import short_conv as our_short_conv
from llorch.ops.swiglu import swiglu as our_swiglu


def expert_outputs(h: Array, ids: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """Compute the output of each chosen expert for its token, (seq, topk, hidden)."""
    gate, up = our_linear_by_expert(h, ids, gate_proj), our_linear_by_expert(h, ids, up_proj)
    return our_linear_by_expert(our_swiglu(gate, up), ids, down_proj)


def _stacked(matrices: Sequence[Any]) -> Array:
    return np.stack([dense(matrix) for matrix in matrices])


def _experts_adapted(call: Call, right: Call) -> Call:
    def adapted(h: Array, ids: Array, w: Mapping[str, Any], keep: Call) -> Array:
        weights = {name: _stacked(w[f"experts_{name}"]) for name in ("gate_proj", "up_proj", "down_proj")}
        return keep("expert_out", call(h=h, ids=ids, **weights))

    return adapted


def _rule_adapted(call: Call, right: Call) -> Call:
    return lambda q, k, v, beta, g, state: call(q=q, k=k, v=v, beta=beta, g=g, state=state)


SHORT_CONV = Exercise(
    name="short_conv", reference=lambda x, kernel, state: our_short_conv(x, kernel, state), returns=("y",),
    stages=("conv_out",), replaces="llorch.ops.short_conv.short_conv",
    adapt=lambda call, right: lambda x, kernel, state: call(x=x, kernel=kernel, state=state),
)  # fmt: skip
L2_NORM = Exercise(
    name="l2_norm", reference=lambda x: our_l2_norm(x), returns=("y",), stages=("q_l2", "k_l2"),
    replaces="llorch.ops.delta_rule.l2_norm", adapt=lambda call, right: lambda x: call(x=x),
)  # fmt: skip
LOG_DECAY = Exercise(
    name="log_decay", reference=lambda a, dt_bias, decay: our_log_decay(a, dt_bias, decay), returns=("g",),
    stages=("log_decay",), replaces="llorch.ops.delta_rule.log_decay",
    adapt=lambda call, right: lambda a, dt_bias, decay: call(a=a, dt_bias=dt_bias, decay=decay),
)  # fmt: skip
DELTA_RULE = Exercise(
    name="delta_rule", reference=lambda q, k, v, beta, g, state: our_delta_rule(q, k, v, beta, g, state),
    returns=("out", "state"), stages=("delta_out", "delta_state"), replaces="llorch.ops.delta_rule.delta_rule",
    adapt=_rule_adapted, also=(("llorch.ops.delta_rule.delta_rule_in_chunks", _rule_adapted),),
)  # fmt: skip
TOP_K = Exercise(
    name="top_k", reference=lambda scores, k: our_top_k(scores, k), returns=("ids",), stages=("topk_ids",),
    replaces="llorch.ops.routing.top_k", adapt=lambda call, right: lambda scores, k: call(scores=scores, k=k),
)  # fmt: skip
TOPK_WEIGHTS = Exercise(
    name="topk_weights",
    reference=lambda probs, ids, normalised: our_topk_weights(probs, ids, normalised=normalised),
    returns=("weights",), stages=("topk_weights",), replaces="llorch.ops.routing.topk_weights",
    adapt=lambda call, right: lambda probs, ids, *, normalised: call(probs=probs, ids=ids, normalised=normalised),
)  # fmt: skip
EXPERT_OUTPUTS = Exercise(
    name="expert_outputs", reference=expert_outputs, returns=("outs",), stages=("expert_out",),
    replaces="llorch.model.blocks.experts.chosen", adapt=_experts_adapted,
    hidden=lambda config: ("expert_gate", "expert_up", "expert_act"),
)  # fmt: skip
MIXED = Exercise(
    name="mixed", reference=lambda outs, weights, shared, gate: our_mixed(outs, weights, shared, gate), returns=("y",),
    stages=("moe_out",), replaces="llorch.ops.routing.mixed",
    adapt=lambda call, right: lambda outs, weights, shared=None, gate=None: call(
        outs=outs, weights=weights, shared=shared, gate=gate
    ),
)  # fmt: skip
