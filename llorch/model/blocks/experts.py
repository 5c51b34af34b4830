"""Mixture of experts in place of the feed-forward part: Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE.

A router chooses a few of many small feed-forward parts for every token. The weights of the others are not touched.
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.families.layers import Experts
from llorch.model.forward import Hidden, Keep, OfLayer
from llorch.ops.linear import linear
from llorch.ops.routing import linear_by_expert, mixed, router_probs, top_k, topk_weights
from llorch.ops.sigmoid import sigmoid
from llorch.ops.swiglu import swiglu

Given = Hidden | Float[np.ndarray, "seq topk hidden"]  # to all experts of a token, or to each


def experts(h: Hidden, w: OfLayer, keep: Keep, *, settings: Experts) -> Hidden:
    """Choose experts for each token, sum what they make of it by weight, add the shared one."""
    probs = keep("router_probs", router_probs(keep("router_logits", linear(h, w["router"]))))
    ids = keep("topk_ids", top_k(probs, settings.n_experts_per_token))
    weights = keep("topk_weights", topk_weights(probs, ids, normalised=settings.norm_topk_prob))
    outs = chosen(h, ids, w, keep)
    shared = shared_expert(h, w, keep) if settings.shared_size else None
    gate = keep("shared_gate", sigmoid(linear(h, w["shared_gate"]))) if settings.shared_gate else None
    return keep("moe_out", mixed(outs, weights, shared, gate))


def chosen(h: Given, ids: Int[np.ndarray, "seq topk"], w: OfLayer, keep: Keep) -> Float[np.ndarray, "seq topk hidden"]:
    """SwiGLU of each expert of each token."""
    gate = keep("expert_gate", linear_by_expert(h, ids, w["experts_gate_proj"]))
    up = keep("expert_up", linear_by_expert(h, ids, w["experts_up_proj"]))
    return keep("expert_out", linear_by_expert(keep("expert_act", swiglu(gate, up)), ids, w["experts_down_proj"]))


def shared_expert(h: Hidden, w: OfLayer, keep: Keep) -> Hidden:
    """SwiGLU of the expert that every token has."""
    gate = keep("shared_ffn_gate", linear(h, w["shared_gate_proj"]))
    up = keep("shared_ffn_up", linear(h, w["shared_up_proj"]))
    return keep("shared_out", linear(keep("shared_ffn_act", swiglu(gate, up)), w["shared_down_proj"]))
