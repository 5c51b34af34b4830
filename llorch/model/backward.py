"""The backward pass of Llama and Qwen on one screen: `forward.py` in reverse order.

`d_x` is dL/dx, the gradient of the loss L by the stage x, so it has the shape of x. Three rules are used:

    y = f(x)                 d_x comes from the op's `*_backward`, with its formula in the op's file
    y = a + b                d_a and d_b are both d_y: the residual stream carries the gradient past every block
    x is used twice          its gradients are added: x of the residual stream, h of q, k, v and of gate, up

The weights of the model are frozen: the gradient flows through them, but they get no gradient. Only adapters are
trained, and get their gradient at their matrix. `keep` gets the gradient of every stage under the stage's name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int

from llorch.families.config import ModelConfig
from llorch.files import LayerWeights, Weights
from llorch.model.forward import Keep, dense_only
from llorch.ops.attention import attention_context_backward, attention_probs_backward, attention_scores_backward
from llorch.ops.linear import linear_backward
from llorch.ops.lora import LoraMatrix
from llorch.ops.rms_norm import rms_norm_backward
from llorch.ops.rope import rope_backward, rope_tables
from llorch.ops.swiglu import swiglu_backward

Trace = Mapping[str, np.ndarray]
BackwardParts = Callable[[ModelConfig, int, int], Mapping[str, Callable]]  # (config, layer, n_tokens) -> `mix`, `feed`
Hidden = Float[np.ndarray, "seq hidden"]
Table = Float64[np.ndarray, "seq half"]


def as_is(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array: the `keep` that stores nothing."""
    return array


def backward(
    d_logits: Float[np.ndarray, "seq vocab"],
    ids: Int[np.ndarray, " seq"],
    trace: Trace,
    weights: Weights,
    *,
    keep: Keep = as_is,
    parts_of: BackwardParts = dense_only,
) -> dict[str, np.ndarray]:
    """Propagate the gradient of the loss from the logits to the embedding.

    Args:
        d_logits: Gradient by the logits.
        ids: Token ids of the pass, at positions 0 and up.
        trace: Stages of that forward pass, which started with an empty cache.
        weights: Weights of that forward pass; only adapted weights get gradients.
        keep: Called with the name and the array of every gradient; returns the gradient to propagate.
        parts_of: Replacements in layers that are not dense, see `llorch.model.blocks.backward`.

    Returns:
        Gradient by every stage, `l0.q_rope`, and block input, `l0.block_in`, under its key in the trace; and by every
        tensor of the adapter, `layers.0.q_proj.lora_A`.

    Raises:
        ValueError: A layer is not dense and `parts_of` is missing.
    """
    config, grads = weights.config, {}
    keep = recorder(grads, keep)
    cos, sin = tables(len(ids), config)
    head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    d_x = projection_backward(keep("logits", d_logits), "lm_head", trace["final_norm"], head, keep)
    last_block = trace[f"l{config.n_layers - 1}.block_out"]
    d_x = rms_norm_backward(keep("final_norm", d_x), last_block, weights["final_norm"], eps=config.rms_norm_eps)
    for i in reversed(range(config.n_layers)):
        stage, parts = layer_trace(trace, i), parts_of(config, i, len(ids))
        d_x = block_backward(d_x, stage, weights.layer(i), config, cos, sin, keep_layer(keep, i), **parts)
    embedding_backward(keep("embed", d_x), ids, weights["embed_tokens"], keep)
    return grads


def block_backward(
    d_out: Hidden, stage: Trace, w: LayerWeights, config: ModelConfig, cos: Table, sin: Table, keep: Keep, *,
    mix: Callable | None = None, feed: Callable | None = None,
) -> Hidden:  # fmt: skip
    """Propagate through one layer: along the residual stream, and through feed-forward and attention."""
    eps, d_out = config.rms_norm_eps, keep("block_out", d_out)
    d_h = keep("ffn_norm", (feed or feed_forward_backward)(d_out, stage, w, keep))
    d_x = keep("attn_residual", d_out + rms_norm_backward(d_h, stage["attn_residual"], w["ffn_norm"], eps=eps))
    d_h = keep("attn_norm", (mix or attention_backward)(d_x, stage, w, config, cos, sin, keep))
    return keep("block_in", d_x + rms_norm_backward(d_h, stage["block_in"], w["attn_norm"], eps=eps))


def attention_backward(
    d_out: Hidden, stage: Trace, w: LayerWeights, config: ModelConfig, cos: Table, sin: Table, keep: Keep
) -> Hidden:
    """Propagate through output projection, weighted values, softmax, rotation and the three projections."""
    seq, head_dim, eps = len(d_out), config.head_dim, config.rms_norm_eps
    q, k, v, probs = (stage[name] for name in ("q_rope", "k_cache", "v_cache", "attn_probs"))
    d_context = projection_backward(keep("attn_out", d_out), "o_proj", stage["attn_context"], w["o_proj"], keep)
    d_probs, d_v = attention_context_backward(keep("attn_context", d_context), probs, v)
    d_scores = attention_probs_backward(keep("attn_probs", d_probs), probs)
    d_q, d_k = attention_scores_backward(keep("attn_scores", d_scores), q, k)
    d_k, d_v = keep("k_cache", d_k).swapaxes(0, 1), keep("v_cache", d_v).swapaxes(0, 1)  # (seq, kv_heads, head_dim)
    d_q, d_k = rope_backward(keep("q_rope", d_q), cos, sin), rope_backward(keep("k_rope", d_k), cos, sin)
    if config.qk_norm:
        q, k = (stage[name].reshape(seq, -1, head_dim) for name in ("q_proj", "k_proj"))
        d_q = rms_norm_backward(keep("q_norm", d_q), q, w["q_norm"], eps=eps)
        d_k = rms_norm_backward(keep("k_norm", d_k), k, w["k_norm"], eps=eps)
    d_q, d_k, d_v = (d_heads.reshape(seq, -1) for d_heads in (d_q, d_k, d_v))  # heads joined
    d_h = projection_backward(keep("q_proj", d_q), "q_proj", stage["attn_norm"], w["q_proj"], keep)
    d_h += projection_backward(keep("k_proj", d_k), "k_proj", stage["attn_norm"], w["k_proj"], keep)
    return d_h + projection_backward(keep("v_proj", d_v), "v_proj", stage["attn_norm"], w["v_proj"], keep)


def feed_forward_backward(d_out: Hidden, stage: Trace, w: LayerWeights, keep: Keep) -> Hidden:
    """Propagate through the down projection, SwiGLU, and the gate and up projections."""
    h = stage["ffn_norm"]
    d_act = projection_backward(keep("ffn_out", d_out), "down_proj", stage["ffn_act"], w["down_proj"], keep)
    d_gate, d_up = swiglu_backward(keep("ffn_act", d_act), stage["ffn_gate"], stage["ffn_up"])
    d_h = projection_backward(keep("ffn_gate", d_gate), "gate_proj", h, w["gate_proj"], keep)
    return d_h + projection_backward(keep("ffn_up", d_up), "up_proj", h, w["up_proj"], keep)


def projection_backward(
    d_y: Float[np.ndarray, "seq out"], name: str, x: Float[np.ndarray, "seq in"], weight: Any, keep: Keep
) -> Float[np.ndarray, "seq in"]:
    """Propagate through one projection of `x`, and pass the gradients of its adapter to `keep`."""
    if not isinstance(weight, LoraMatrix):
        return linear_backward(d_y, weight)
    d_x, trained = weight.backward(d_y, x)
    name = weight.lora.name or name if weight.lora is not None else name
    for kind, array in trained.items():
        keep(f"{name}.{kind}", array)
    return d_x


def embedding_backward(d_embed: Hidden, ids: Int[np.ndarray, " seq"], weight: Any, keep: Keep) -> None:
    """Pass the gradients of the embedding's adapter to `keep`, if there is one."""
    if isinstance(weight, LoraMatrix):
        for kind, array in weight.rows_backward(d_embed, ids).items():
            keep(f"embed_tokens.{kind}", array)


def recorder(arrays: dict[str, np.ndarray], keep: Keep = as_is) -> Keep:
    """Return a `keep` that stores the array returned by another `keep`."""

    def record(name: str, array: np.ndarray) -> np.ndarray:
        arrays[name] = keep(name, array)
        return arrays[name]

    return record


def keep_layer(keep: Keep, layer: int) -> Keep:
    """Return a `keep` that adds the layer to names: `l0.` to stages, `layers.0.` to adapter tensors."""
    return lambda name, array: keep(f"layers.{layer}.{name}" if "." in name else f"l{layer}.{name}", array)


def layer_trace(trace: Trace, layer: int) -> Trace:
    """Return the stages of one layer by short name, with the input of the block."""
    prefix = f"l{layer}."
    stages = {key.removeprefix(prefix): array for key, array in trace.items() if key.startswith(prefix)}
    return stages | {"block_in": trace["embed" if layer == 0 else f"l{layer - 1}.block_out"]}


def tables(seq: int, config: ModelConfig) -> tuple[Table, Table]:
    """Compute the cosines and sines of the positions 0 to seq - 1."""
    return rope_tables(np.arange(seq), head_dim=config.rotated, theta=config.rope_theta, scaling=config.rope_scaling)
