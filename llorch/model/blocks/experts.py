"""Mixture of experts in place of the feed-forward part: Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE.

A router selects a few of many small feed-forward networks for every token. Weights of unselected experts are not read.
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.families.layers import Experts
from llorch.model.forward import Hidden, Keep, Tensors
from llorch.ops.linear import linear
from llorch.ops.routing import linear_by_expert, mixed, router_probs, top_k, topk_weights
from llorch.ops.sigmoid import sigmoid
from llorch.ops.swiglu import swiglu

Tokens = Hidden | Float[np.ndarray, "seq topk hidden"]  # one row per token, or per selected expert


def experts(h: Hidden, w: Tensors, keep: Keep, *, settings: Experts) -> Hidden:
    """Select experts for each token, sum their outputs by weight, add the shared expert."""
    probs = keep("router_probs", router_probs(keep("router_logits", linear(h, w["router"]))))
    ids = keep("topk_ids", top_k(probs, settings.n_experts_per_token))
    weights = keep("topk_weights", topk_weights(probs, ids, normalised=settings.norm_topk_prob))
    outs = chosen(h, ids, w, keep)
    shared = shared_expert(h, w, keep) if settings.shared_size else None
    gate = keep("shared_gate", sigmoid(linear(h, w["shared_gate"]))) if settings.shared_gate else None
    return keep("moe_out", mixed(outs, weights, shared, gate))


def chosen(h: Tokens, ids: Int[np.ndarray, "seq topk"], w: Tensors, keep: Keep) -> Float[np.ndarray, "seq topk hidden"]:
    """Compute SwiGLU of each selected expert of each token."""
    gate = keep("expert_gate", linear_by_expert(h, ids, w["experts_gate_proj"]))
    up = keep("expert_up", linear_by_expert(h, ids, w["experts_up_proj"]))
    return keep("expert_out", linear_by_expert(keep("expert_act", swiglu(gate, up)), ids, w["experts_down_proj"]))


def shared_expert(h: Hidden, w: Tensors, keep: Keep) -> Hidden:
    """Compute SwiGLU of the shared expert, which every token uses."""
    gate = keep("shared_ffn_gate", linear(h, w["shared_gate_proj"]))
    up = keep("shared_ffn_up", linear(h, w["shared_up_proj"]))
    return keep("shared_out", linear(keep("shared_ffn_act", swiglu(gate, up)), w["shared_down_proj"]))
