"""The backward pass of every family: the dense backward pass, with the functions below in layers that differ.

Each function is a forward function in reverse order, with the three rules of `llorch.model.backward`, and a fourth:

    a selection              has no gradient: the ids of the selected experts are constants, and so is the mask of a
                             window or a chunk

`conv_state` and `delta_state` have no gradient, because the loss of this pass does not depend on the state after it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from llorch.families.config import ModelConfig
from llorch.families.layers import Experts
from llorch.files import Weights
from llorch.model.backward import Hidden, Table, Trace, as_is, projection_backward
from llorch.model.backward import backward as backward_through_blocks
from llorch.model.forward import Keep, Tensors
from llorch.ops.attention import attention_context_backward, attention_probs_backward, attention_scores_backward
from llorch.ops.delta_rule import l2_norm_backward, log_decay_backward
from llorch.ops.delta_rule_backward import delta_rule_backward
from llorch.ops.rms_norm import rms_norm, rms_norm_backward
from llorch.ops.rope import rope_adjacent_backward, rope_backward
from llorch.ops.routing import mixed_backward, router_probs_backward, spread, topk_weights_backward
from llorch.ops.short_conv import short_conv_backward
from llorch.ops.sigmoid import sigmoid_backward
from llorch.ops.swiglu import swiglu_backward

Rows = Float[np.ndarray, "seq topk _width"]  # one row per token and selected expert


def backward(
    d_logits: Float[np.ndarray, "seq vocab"],
    ids: Int[np.ndarray, " seq"],
    trace: Trace,
    weights: Weights,
    *,
    keep: Keep = as_is,
) -> dict[str, np.ndarray]:
    """Propagate the gradient of the loss through a model of any family; see `llorch.model.backward.backward`."""
    return backward_through_blocks(d_logits, ids, trace, weights, keep=keep, parts_of=parts_of)


def parts_of(config: ModelConfig, layer: int, seq: int) -> Mapping[str, Callable]:
    """Return the replacements in a layer that is not dense: `mix` for attention, `feed` for the feed-forward."""
    kind, parts = config.layer(layer), {}
    if kind.mixer == "delta_net":
        parts["mix"] = delta_net_backward
    elif kind.uses_positions or config.attention_gate or config.interleaved_rope_hf:
        factor = (
            config.temperature.of(np.arange(seq)) if kind.has_attention_temperature and config.temperature else None
        )
        parts["mix"] = partial(attention_backward, factor=factor)
    if kind.experts and config.experts is not None:
        parts["feed"] = partial(experts_backward, settings=config.experts)
    return parts


def attention_backward(
    d_out: Hidden, stage: Trace, w: Tensors, config: ModelConfig, cos: Table, sin: Table, keep: Keep, *,
    factor: Float[np.ndarray, " seq"] | None,
) -> Hidden:  # fmt: skip
    """Propagate through attention with the gate, temperature, head norms and rotation that the layer has.

    Windows and chunks need no code: where a score is -inf its probability is 0, and so is its gradient.
    """
    seq, probs, k, v = len(d_out), stage["attn_probs"], stage["k_cache"], stage["v_cache"]
    context = stage["attn_gated" if "attn_gate" in stage else "attn_context"]
    d_context = projection_backward(keep("attn_out", d_out), "o_proj", context, w["o_proj"], keep)
    d_gate = None
    if "attn_gate" in stage:
        d_gated = keep("attn_gated", d_context)
        d_context = d_gated * stage["attn_gate"]
        d_gate = sigmoid_backward(keep("attn_gate", d_gated * stage["attn_context"]), stage["attn_gate"])
    d_probs, d_v = attention_context_backward(keep("attn_context", d_context), probs, v)
    d_scores = attention_probs_backward(keep("attn_probs", d_probs), probs)
    d_q, d_k = attention_scores_backward(keep("attn_scores", d_scores), score_queries(stage, config), k)
    d_k, d_v = keep("k_cache", d_k).swapaxes(0, 1), keep("v_cache", d_v).swapaxes(0, 1)  # (seq, kv_heads, head_dim)
    if factor is not None:
        d_q = (keep("q_tempered", d_q) * factor[:, None, None]).astype(d_q.dtype, copy=False)
    d_q, d_k = (heads_backward(d, side, stage, w, config, cos, sin, keep) for d, side in ((d_q, "q"), (d_k, "k")))
    if d_gate is not None:
        d_q = np.concatenate([d_q, d_gate.reshape(d_q.shape)], axis=-1)  # (seq, heads, 2 * head_dim)
    h, q_name = stage["attn_norm"], "q_proj" if d_gate is None else "q_gate_proj"
    d_h = projection_backward(keep(q_name, d_q.reshape(seq, -1)), "q_proj", h, w["q_proj"], keep)
    d_h += projection_backward(keep("k_proj", d_k.reshape(seq, -1)), "k_proj", h, w["k_proj"], keep)
    return d_h + projection_backward(keep("v_proj", d_v.reshape(seq, -1)), "v_proj", h, w["v_proj"], keep)


def heads_backward(
    d_heads: np.ndarray, side: str, stage: Trace, w: Tensors, config: ModelConfig, cos: Table, sin: Table, keep: Keep
) -> np.ndarray:
    """Propagate from queries or keys (`side` q or k) to their projection, through head norm, rotation and norm."""
    eps = config.rms_norm_eps
    if f"{side}_head_norm" in stage:
        rotated = stage[f"{side}_rope"]
        d_heads = keep(f"{side}_head_norm", d_heads)
        d_heads = rms_norm_backward(d_heads, rotated, np.ones(config.head_dim, rotated.dtype), eps=eps)
    if f"{side}_rope" in stage:
        rotate_back = rope_adjacent_backward if config.interleaved_rope_hf else rope_backward
        d_heads = rotate_back(keep(f"{side}_rope", d_heads), cos, sin)
    if f"{side}_norm" in stage:
        heads = projected_queries(stage, config) if side == "q" else stage["k_proj"].reshape(d_heads.shape)
        d_heads = rms_norm_backward(keep(f"{side}_norm", d_heads), heads, w[f"{side}_norm"], eps=eps)
    return d_heads


def score_queries(stage: Trace, config: ModelConfig) -> Float[np.ndarray, "seq heads head_dim"]:
    """Return the queries of the attention scores."""
    last_stage = next((name for name in ("q_tempered", "q_head_norm", "q_rope", "q_norm") if name in stage), None)
    return projected_queries(stage, config) if last_stage is None else stage[last_stage]


def projected_queries(stage: Trace, config: ModelConfig) -> Float[np.ndarray, "seq heads head_dim"]:
    """Return the projected query heads; with a gate they are the first half of each head."""
    projected = stage["q_gate_proj"] if "q_gate_proj" in stage else stage["q_proj"]
    return projected.reshape(len(projected), config.n_heads, -1)[..., : config.head_dim]


def delta_net_backward(
    d_out: Hidden, stage: Trace, w: Tensors, config: ModelConfig, cos: Table, sin: Table, keep: Keep
) -> Hidden:
    """Propagate through a gated delta net: output, norm, delta rule, convolution, projections."""
    net, h = config.delta_net, stage["attn_norm"]
    assert net is not None
    d_gated = projection_backward(keep("linear_out", d_out), "out_proj", stage["gated_norm"], w["out_proj"], keep)
    d_delta, d_z = gated_norm_backward(keep("gated_norm", d_gated), stage, w, config)
    q, k = stage["q_l2"], stage["k_l2"]
    unscaled_q, unscaled_k, v = conv_heads(stage["conv_out"], config)
    d_delta_out = keep("delta_out", d_delta)
    d_q, d_k, d_v, d_beta, d_g = delta_rule_backward(d_delta_out, q, k, v, stage["beta"], stage["log_decay"])
    d_q, d_k = l2_norm_backward(keep("q_l2", d_q), unscaled_q), l2_norm_backward(keep("k_l2", d_k), unscaled_k)
    d_conv = np.concatenate([d_heads.reshape(len(h), -1) for d_heads in (d_q, d_k, d_v)], axis=-1)  # (seq, conv_width)
    d_qkv = short_conv_backward(keep("conv_out", d_conv), stage["qkv_in"], w["conv"])
    d_a = log_decay_backward(keep("log_decay", d_g), stage["a_in"], w["dt_bias"], w["decay"])
    d_b = sigmoid_backward(keep("beta", d_beta), stage["beta"])
    with sum_by_name(keep) as keep_sums:
        d_h = projection_backward(keep("qkv_in", d_qkv), "in_qkv", h, w["in_qkv"], keep_sums)
        d_h += projection_backward(keep("z_in", d_z), "in_z", h, w["in_z"], keep_sums)
        d_h += projection_backward(keep("b_in", d_b), "in_b", h, w["in_b"], keep_sums)
        return d_h + projection_backward(keep("a_in", d_a), "in_a", h, w["in_a"], keep_sums)


def gated_norm_backward(
    d_gated: Float[np.ndarray, "seq value_width"], stage: Trace, w: Tensors, config: ModelConfig
) -> tuple[Float[np.ndarray, "seq v_heads value_dim"], Float[np.ndarray, "seq value_width"]]:
    """Compute the gradients of `rms_norm(delta_out) * silu(z)` by `delta_out` and z."""
    out, (seq, width) = stage["delta_out"], d_gated.shape
    normed = rms_norm(out, w["delta_norm"], eps=config.rms_norm_eps)
    d_z, d_normed = swiglu_backward(d_gated, stage["z_in"], normed.reshape(seq, width))
    return rms_norm_backward(d_normed.reshape(out.shape), out, w["delta_norm"], eps=config.rms_norm_eps), d_z


def conv_heads(conv_out: Float[np.ndarray, "seq conv_width"], config: ModelConfig) -> list[np.ndarray]:
    """Split the convolution output into heads of queries, keys and values, before any norm."""
    net = config.delta_net
    assert net is not None
    q, k, v = np.split(conv_out, [net.key_width, 2 * net.key_width], axis=-1)
    sizes = ((q, net.key_head_dim), (k, net.key_head_dim), (v, net.value_head_dim))
    return [x.reshape(len(x), -1, head_dim) for x, head_dim in sizes]


def experts_backward(d_out: Hidden, stage: Trace, w: Tensors, keep: Keep, *, settings: Experts) -> Hidden:
    """Propagate through the shared expert, the selected experts, their weights and the router."""
    h, ids, weights = stage["ffn_norm"], stage["topk_ids"], stage["topk_weights"]
    d_out = keep("moe_out", d_out)
    d_h = shared_backward(d_out, stage, w, keep) if settings.shared_size else np.zeros_like(h)
    if settings.scaled_inputs:
        d_outs = np.broadcast_to(d_out[:, None], stage["expert_out"].shape)
        d_inputs, d_weights = scaled_inputs_backward(selected_backward(d_outs, stage, w, keep), h, weights, keep)
        d_logits = spread(sigmoid_backward(d_weights, weights), ids, n_experts=settings.n_experts)
    else:
        d_outs, d_weights = mixed_backward(d_out, stage["expert_out"], weights)
        d_inputs, probs = selected_backward(d_outs, stage, w, keep).sum(axis=1), stage["router_probs"]
        d_weights = keep("topk_weights", d_weights)
        d_probs = topk_weights_backward(d_weights, probs, ids, normalised=settings.norm_topk_prob)
        d_logits = router_probs_backward(keep("router_probs", d_probs), probs)
    return d_h + d_inputs + projection_backward(keep("router_logits", d_logits), "router", h, w["router"], keep)


def scaled_inputs_backward(
    d_in: Rows, h: Hidden, weights: Float[np.ndarray, "seq topk"], keep: Keep
) -> tuple[Hidden, Float[np.ndarray, "seq topk"]]:
    """Compute the gradients by the token and by the weights, which multiply the input of each expert."""
    d_in = keep("expert_in", d_in)
    return (weights[..., None] * d_in).sum(axis=1), keep("topk_weights", (d_in * h[:, None]).sum(axis=-1))


def selected_backward(d_outs: Rows, stage: Trace, w: Tensors, keep: Keep) -> Rows:
    """Propagate through the selected experts; returns the gradient by the input of each (token, expert)."""
    ids = stage["topk_ids"]
    x = stage["expert_in"] if "expert_in" in stage else np.broadcast_to(stage["ffn_norm"][:, None, :], d_outs.shape)
    with sum_by_name(keep) as keep_sums:
        d_act = expert_backward(keep("expert_out", d_outs), stage["expert_act"], ids, "experts_down_proj", w, keep_sums)
        d_gate, d_up = swiglu_backward(keep("expert_act", d_act), stage["expert_gate"], stage["expert_up"])
        d_x = expert_backward(keep("expert_gate", d_gate), x, ids, "experts_gate_proj", w, keep_sums)
        return d_x + expert_backward(keep("expert_up", d_up), x, ids, "experts_up_proj", w, keep_sums)


def expert_backward(d_y: Rows, x: Rows, ids: Int[np.ndarray, "seq topk"], name: str, w: Tensors, keep: Keep) -> Rows:
    """Propagate through one projection of the selected experts."""
    d_x = np.zeros(x.shape, d_y.dtype)
    for expert in np.unique(ids):
        is_selected = ids == expert  # (seq, topk)
        d_x[is_selected] = projection_backward(d_y[is_selected], name, x[is_selected], w[name][expert], keep)
    return d_x


def shared_backward(d_out: Hidden, stage: Trace, w: Tensors, keep: Keep) -> Hidden:
    """Propagate through the shared expert and its gate."""
    h, d_shared, d_h = stage["ffn_norm"], d_out, np.zeros_like(d_out)
    if "shared_gate" in stage:
        d_shared = d_out * stage["shared_gate"]
        d_gate = keep("shared_gate", (d_out * stage["shared_out"]).sum(axis=-1, keepdims=True))
        d_gate = sigmoid_backward(d_gate, stage["shared_gate"])
        d_h = projection_backward(d_gate, "shared_gate", h, w["shared_gate"], keep)
    d_act = projection_backward(
        keep("shared_out", d_shared), "shared_down_proj", stage["shared_ffn_act"], w["shared_down_proj"], keep
    )
    d_gate, d_up = swiglu_backward(keep("shared_ffn_act", d_act), stage["shared_ffn_gate"], stage["shared_ffn_up"])
    d_h += projection_backward(keep("shared_ffn_gate", d_gate), "shared_gate_proj", h, w["shared_gate_proj"], keep)
    return d_h + projection_backward(keep("shared_ffn_up", d_up), "shared_up_proj", h, w["shared_up_proj"], keep)


@contextmanager
def sum_by_name(keep: Keep) -> Iterator[Keep]:
    """Yield a `keep` that sums gradients of the same name, and passes the sums on at the end."""
    sums: dict[str, Any] = {}

    def add(name: str, array: np.ndarray) -> np.ndarray:
        sums[name] = sums[name] + array if name in sums else array
        return array

    yield add
    for name, array in sums.items():
        keep(name, array)
