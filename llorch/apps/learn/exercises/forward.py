"""Exercises of the forward pass: lessons 01 to 08, and the embedding of 00.

An adapter (`_x_adapted`) translates the call of llorch's forward pass to `call`, the learner's function; `right` is
llorch's. `keep(stage, array)` shows a stage to observers and returns the array to go on with. This module imports
llorch's functions as `our_x`: an installed exercise replaces the original name wherever llorch uses it, not this one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise, by_keyword
from llorch.families.config import ModelConfig, RopeScaling, YarnScaling
from llorch.files import Weights
from llorch.model.cache import KVCache
from llorch.ops.attention import attention_context as our_context
from llorch.ops.attention import attention_probs as our_probs
from llorch.ops.attention import attention_scores as our_scores
from llorch.ops.delta_rule import delta_rule as our_delta_rule
from llorch.ops.delta_rule import l2_norm as our_l2_norm
from llorch.ops.delta_rule import log_decay as our_log_decay
from llorch.ops.embedding import embedding as our_embedding
from llorch.ops.linear import linear as our_linear
from llorch.ops.lora import LoraMatrix
from llorch.ops.numerics import QuantMethod
from llorch.ops.rms_norm import rms_norm as our_rms_norm
from llorch.ops.rope import frequencies as our_frequencies
from llorch.ops.rope import rope as our_rope
from llorch.ops.rope import scale_frequencies
from llorch.ops.routing import linear_by_expert as our_linear_by_expert
from llorch.ops.routing import mixed as our_mixed
from llorch.ops.routing import top_k as our_top_k
from llorch.ops.routing import topk_weights as our_topk_weights
from llorch.ops.short_conv import short_conv as our_short_conv
from llorch.ops.swiglu import swiglu as our_swiglu
from llorch.runtime.errors import UserError
from llorch.stages.table import DENSE_PRODUCTS, STAGES

Array = np.ndarray
Arrays = Mapping[str, Array]
VISIBLE_IN_BLOCK = ("k_cache", "v_cache", "block_out")  # stages that a learner's `block` returns
IN_BLOCK = tuple(stage.name for stage in STAGES if stage.in_layer and stage.name not in VISIBLE_IN_BLOCK)


def dense(weight: Array | QuantMethod | LoraMatrix | None) -> Any:
    """Return a weight as an array, dequantised if it is packed; UserError for a weight with an adapter."""
    if isinstance(weight, LoraMatrix):
        raise UserError("--impl: your functions multiply plain matrices, not matrices with an adapter; run without one")
    return weight if weight is None or isinstance(weight, np.ndarray) else weight.dequantize()


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Apply RMSNorm to the last axis."""
    return our_rms_norm(x, weight, eps=eps)


def qkv(
    h: Array, q_proj: Array, k_proj: Array, v_proj: Array, q_bias: Array | None, k_bias: Array | None,
    v_bias: Array | None, q_norm: Array | None, k_norm: Array | None, head_dim: int, eps: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Project to q, k and v, each (seq, heads, head_dim); q_norm and k_norm normalise every head."""
    q, k, v = (
        our_linear(h, weight, bias).reshape(len(h), -1, head_dim)
        for weight, bias in ((q_proj, q_bias), (k_proj, k_bias), (v_proj, v_bias))
    )
    if q_norm is not None and k_norm is not None:
        q, k = our_rms_norm(q, q_norm, eps=eps), our_rms_norm(k, k_norm, eps=eps)
    return q, k, v


def rope_tables(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """Compute cosines and sines of every position and pair, (seq, half), in float64."""
    angle = positions[:, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def append(past_k: Array, past_v: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Append keys and values of new tokens (seq, kv_heads, head_dim) to the caches (kv_heads, ctx, head_dim)."""
    return np.concatenate([past_k, k.swapaxes(0, 1)], axis=1), np.concatenate([past_v, v.swapaxes(0, 1)], axis=1)


def attention_output(context: Array, o_proj: Array, o_bias: Array | None) -> Array:
    """Project the concatenated heads to the hidden size."""
    return our_linear(context, o_proj, o_bias)


def feed_forward(h: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """Apply the gate and up projections, SwiGLU and the down projection."""
    return our_linear(our_swiglu(our_linear(h, gate_proj), our_linear(h, up_proj)), down_proj)


def block(
    x: Array, w: Arrays, cos: Array, sin: Array, past_k: Array, past_v: Array, head_dim: int, eps: float
) -> tuple[Array, Array, Array]:
    """Run one layer; return its output, and both caches including the new tokens."""
    biases, norms = (w.get("q_bias"), w.get("k_bias"), w.get("v_bias")), (w.get("q_norm"), w.get("k_norm"))
    h = our_rms_norm(x, w["attn_norm"], eps=eps)
    q, k, v = qkv(h, w["q_proj"], w["k_proj"], w["v_proj"], *biases, *norms, head_dim, eps)
    k, v = append(past_k, past_v, our_rope(k, cos, sin), v)
    context = our_context(our_probs(our_scores(our_rope(q, cos, sin), k)), v)
    x = x + attention_output(context, w["o_proj"], w.get("o_bias"))
    h = our_rms_norm(x, w["ffn_norm"], eps=eps)
    return x + feed_forward(h, w["gate_proj"], w["up_proj"], w["down_proj"]), k, v


def logits(x: Array, final_norm: Array, lm_head: Array | None, embed_tokens: Array, eps: float) -> Array:
    """Apply the final norm, and compute one logit per vocabulary entry; with tied embeddings there is no lm_head."""
    return our_linear(our_rms_norm(x, final_norm, eps=eps), embed_tokens if lm_head is None else lm_head)


def _linear_adapted(call: Call, right: Call) -> Call:
    return lambda x, weight, bias=None: call(x=x, weight=dense(weight), bias=bias)


def _qkv_adapted(call: Call, right: Call) -> Call:
    def adapted(h: Array, w: Mapping[str, Any], config: ModelConfig, keep: Call) -> tuple[Array, Array, Array]:
        weights = {name: dense(w[name]) for name in ("q_proj", "k_proj", "v_proj")}
        optional_weights = {name: w.get(name) for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")}
        q, k, v = call(h=h, **weights, **optional_weights, head_dim=config.head_dim, eps=config.rms_norm_eps)
        if config.qk_norm:
            return keep("q_norm", q), keep("k_norm", k), _keep_flat(keep, "v_proj", v)
        return _keep_flat(keep, "q_proj", q), _keep_flat(keep, "k_proj", k), _keep_flat(keep, "v_proj", v)

    return adapted


def _keep_flat(keep: Call, name: str, heads: Array) -> Array:
    """Keep an array of heads as (seq, heads * head_dim), and return the kept array in the original shape."""
    return keep(name, heads.reshape(len(heads), -1)).reshape(heads.shape)


def _tables_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function with scaled frequencies; the adapter applies YaRN's attention factor."""
    from llorch.ops import rope  # its `frequencies` may be the learner's

    def adapted(positions: Array, *, head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Array, Array]:
        inv_freq = scale_frequencies(rope.frequencies(head_dim, theta), scaling, head_dim=head_dim, theta=theta)
        gain = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        cos, sin = call(positions=positions, inv_freq=inv_freq)
        return cos * gain, sin * gain

    return adapted


def _rope_adapted(call: Call, right: Call) -> Call:
    def adapted(x: Array, cos: Array, sin: Array) -> Array:
        width = 2 * cos.shape[-1]  # channels; partial RoPE rotates only the first ones of a head
        rotated = call(x=x[..., :width], cos=cos, sin=sin)
        return rotated if width == x.shape[-1] else np.concatenate([rotated, x[..., width:]], axis=-1)

    return adapted


def _scale_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function with the factors (a division) that llorch's scaling uses."""

    def adapted(inv_freq: Array, scaling: RopeScaling | None, *, head_dim: int, theta: float) -> Array:
        if scaling is None:
            return inv_freq
        return call(inv_freq=inv_freq, factors=inv_freq / right(inv_freq, scaling, head_dim=head_dim, theta=theta))

    return adapted


def _append_adapted(call: Call, right: Call) -> Call:
    def adapted(cache: KVCache, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        past_k, past_v = (cached[layer][:, : cache.length] for cached in (cache._keys, cache._values))
        cache._keys[layer], cache._values[layer] = call(past_k=past_k, past_v=past_v, k=k, v=v)
        return cache._keys[layer], cache._values[layer]

    return adapted


def _output_adapted(call: Call, right: Call) -> Call:
    return lambda context, w, keep: keep(
        "attn_out", call(context=context, o_proj=dense(w["o_proj"]), o_bias=w.get("o_bias"))
    )


def _feed_forward_adapted(call: Call, right: Call) -> Call:
    names = ("gate_proj", "up_proj", "down_proj")
    return lambda h, w, keep: keep("ffn_out", call(h=h, **{name: dense(w[name]) for name in names}))


def _block_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function for a layer, and append the new keys and values to the cache."""

    def adapted(
        x: Array, w: Mapping[str, Any], config: ModelConfig, cos: Array, sin: Array, append: Call, keep: Call
    ) -> Array:
        no_tokens = np.empty((0, config.n_kv_heads, config.head_dim), x.dtype)
        past_k, past_v = append(no_tokens, no_tokens)  # appending nothing returns the cached keys and values
        weights = {name: dense(w[name]) for name in w}
        x, k, v = call(
            x=x, w=weights, cos=cos, sin=sin, past_k=past_k, past_v=past_v, head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )  # fmt: skip
        append(*(rows[:, past_k.shape[1] :].swapaxes(0, 1) for rows in (k, v)))
        keep("k_cache", k)
        keep("v_cache", v)
        return keep("block_out", x)

    return adapted


def _logits_adapted(call: Call, right: Call) -> Call:
    def adapted(x: Array, weights: Weights, keep: Call) -> Array:
        config, table = weights.config, dense(weights["embed_tokens"])
        lm_head = None if config.tie_word_embeddings else dense(weights["lm_head"])
        arguments = {"final_norm": weights["final_norm"], "lm_head": lm_head, "embed_tokens": table}
        return keep("logits", call(x=x, **arguments, eps=config.rms_norm_eps))

    return adapted


EMBEDDING = Exercise(
    name="embedding", reference=lambda ids, table: our_embedding(ids, table), returns=("rows",), stages=("embed",),
    replaces="llorch.ops.embedding.embedding",
    adapt=lambda call, right: lambda ids, table: call(ids=ids, table=dense(table)),
)  # fmt: skip
RMS_NORM = Exercise(
    name="rms_norm", reference=rms_norm, returns=("y",), stages=("attn_norm", "ffn_norm", "final_norm"),
    replaces="llorch.ops.rms_norm.rms_norm", adapt=by_keyword("x", "weight"),
)  # fmt: skip
FREQUENCIES = Exercise(
    name="frequencies", reference=lambda head_dim, theta: our_frequencies(head_dim, theta), returns=("inv_freq",),
    replaces="llorch.ops.rope.frequencies", stages=("q_rope", "k_rope"), adapt=by_keyword("head_dim", "theta"),
)  # fmt: skip
SCALE_FREQUENCIES = Exercise(
    name="scale_frequencies", reference=lambda inv_freq, factors: inv_freq / factors, returns=("inv_freq",),
    replaces="llorch.ops.rope.scale_frequencies", stages=("q_rope", "k_rope"), adapt=_scale_adapted,
)  # fmt: skip
ROPE_TABLES = Exercise(
    name="rope_tables", reference=rope_tables, returns=("cos", "sin"), stages=("q_rope", "k_rope"),
    replaces="llorch.ops.rope.rope_tables", adapt=_tables_adapted,
)  # fmt: skip
ROPE = Exercise(
    name="rope", reference=lambda x, cos, sin: our_rope(x, cos, sin), returns=("y",), stages=("q_rope", "k_rope"),
    replaces="llorch.ops.rope.rope", adapt=_rope_adapted,
)  # fmt: skip
LINEAR = Exercise(
    name="linear", reference=lambda x, weight, bias: our_linear(x, weight, bias), returns=("y",),
    stages=tuple(stage.name for stage in DENSE_PRODUCTS), replaces="llorch.ops.linear.linear", adapt=_linear_adapted,
)  # fmt: skip
QKV = Exercise(
    name="qkv", reference=qkv, returns=("q", "k", "v"), stages=("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"),
    replaces="llorch.model.forward.qkv", adapt=_qkv_adapted,
    hidden=lambda config: ("q_proj", "k_proj") if config.qk_norm else (),
)  # fmt: skip
APPEND = Exercise(
    name="append", reference=append, returns=("k", "v"), stages=("k_cache", "v_cache"),
    replaces="llorch.model.cache.KVCache.append", adapt=_append_adapted,
)  # fmt: skip
ATTENTION_SCORES = Exercise(
    name="attention_scores", reference=lambda q, k: our_scores(q, k), returns=("scores",), stages=("attn_scores",),
    replaces="llorch.ops.attention.attention_scores", adapt=by_keyword("q", "k"),
)  # fmt: skip
ATTENTION_PROBS = Exercise(
    name="attention_probs", reference=lambda scores: our_probs(scores), returns=("probs",), stages=("attn_probs",),
    replaces="llorch.ops.attention.attention_probs", adapt=by_keyword("scores"),
)  # fmt: skip
ATTENTION_CONTEXT = Exercise(
    name="attention_context", reference=lambda probs, v: our_context(probs, v), returns=("context",),
    stages=("attn_context",), replaces="llorch.ops.attention.attention_context", adapt=by_keyword("probs", "v"),
)  # fmt: skip
ATTENTION_OUTPUT = Exercise(
    name="attention_output", reference=attention_output, returns=("y",), stages=("attn_out",),
    replaces="llorch.model.forward.attention_output", adapt=_output_adapted,
)  # fmt: skip
SWIGLU = Exercise(
    name="swiglu", reference=lambda gate, up: our_swiglu(gate, up), returns=("y",), stages=("ffn_act",),
    replaces="llorch.ops.swiglu.swiglu", adapt=by_keyword("gate", "up"),
)  # fmt: skip
FEED_FORWARD = Exercise(
    name="feed_forward", reference=feed_forward, returns=("y",), stages=("ffn_out",),
    replaces="llorch.model.forward.feed_forward", adapt=_feed_forward_adapted,
    hidden=lambda config: ("ffn_gate", "ffn_up", "ffn_act"),
)  # fmt: skip
BLOCK = Exercise(
    name="block", reference=block, returns=("x", "k", "v"), stages=VISIBLE_IN_BLOCK,
    replaces="llorch.model.forward.block", adapt=_block_adapted, hidden=lambda config: IN_BLOCK,
)  # fmt: skip
LOGITS = Exercise(
    name="logits", reference=logits, returns=("logits",), stages=("logits",), replaces="llorch.model.forward.logits",
    adapt=_logits_adapted, hidden=lambda config: ("final_norm",),
)  # fmt: skip


def expert_outputs(h: Array, ids: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """Compute the output of each selected expert for its token, (seq, topk, hidden)."""
    gate, up = our_linear_by_expert(h, ids, gate_proj), our_linear_by_expert(h, ids, up_proj)
    return our_linear_by_expert(our_swiglu(gate, up), ids, down_proj)


def _stacked(matrices: Sequence[Any]) -> Array:
    return np.stack([dense(matrix) for matrix in matrices])


def _experts_adapted(call: Call, right: Call) -> Call:
    def adapted(h: Array, ids: Array, w: Mapping[str, Any], keep: Call) -> Array:
        weights = {name: _stacked(w[f"experts_{name}"]) for name in ("gate_proj", "up_proj", "down_proj")}
        return keep("expert_out", call(h=h, ids=ids, **weights))

    return adapted


_RULE_ADAPTED = by_keyword("q", "k", "v", "beta", "g", "state")
SHORT_CONV = Exercise(
    name="short_conv", reference=lambda x, kernel, state: our_short_conv(x, kernel, state), returns=("y",),
    stages=("conv_out",), replaces="llorch.ops.short_conv.short_conv", adapt=by_keyword("x", "kernel", "state"),
)  # fmt: skip
L2_NORM = Exercise(
    name="l2_norm", reference=lambda x: our_l2_norm(x), returns=("y",), stages=("q_l2", "k_l2"),
    replaces="llorch.ops.delta_rule.l2_norm", adapt=by_keyword("x"),
)  # fmt: skip
LOG_DECAY = Exercise(
    name="log_decay", reference=lambda a, dt_bias, decay: our_log_decay(a, dt_bias, decay), returns=("g",),
    stages=("log_decay",), replaces="llorch.ops.delta_rule.log_decay", adapt=by_keyword("a", "dt_bias", "decay"),
)  # fmt: skip
DELTA_RULE = Exercise(
    name="delta_rule", reference=lambda q, k, v, beta, g, state: our_delta_rule(q, k, v, beta, g, state),
    returns=("out", "state"), stages=("delta_out", "delta_state"), replaces="llorch.ops.delta_rule.delta_rule",
    adapt=_RULE_ADAPTED, also=(("llorch.ops.delta_rule.delta_rule_in_chunks", _RULE_ADAPTED),),
)  # fmt: skip
TOP_K = Exercise(
    name="top_k", reference=lambda scores, k: our_top_k(scores, k), returns=("ids",), stages=("topk_ids",),
    replaces="llorch.ops.routing.top_k", adapt=by_keyword("scores", "k"),
)  # fmt: skip
TOPK_WEIGHTS = Exercise(
    name="topk_weights", reference=lambda probs, ids, normalised: our_topk_weights(probs, ids, normalised=normalised),
    returns=("weights",), stages=("topk_weights",), replaces="llorch.ops.routing.topk_weights",
    adapt=by_keyword("probs", "ids"),
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
