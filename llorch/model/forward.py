"""The forward pass of Llama and Qwen on one screen.

Every line that computes a stage of the stage table passes it to `keep`, so that a run can be compared with other
engines stage by stage. The dtype is that of the weights: float32 to run, float64 to check the mathematics.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int

from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.model.cache import KVCache
from llorch.ops.attention import attention_context, attention_probs, attention_scores
from llorch.ops.embedding import embedding
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import rope, rope_tables
from llorch.ops.swiglu import swiglu

Keep = Callable[[str, np.ndarray], np.ndarray]
Tensors = Mapping[str, Any]  # by short name: an array or a `QuantMethod`
Append = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
Hidden = Float[np.ndarray, "seq hidden"]
Heads = Float[np.ndarray, "seq _heads head_dim"]
Table = Float64[np.ndarray, "seq half"]
LayerParts = Callable[[ModelConfig, int, np.ndarray], Mapping[str, Any]]  # (config, layer, positions) -> `mix`, `feed`


def dense_only(config: ModelConfig, layer: int, *_: Any) -> Mapping[str, Any]:
    """Return no parts for a dense layer; ValueError for a layer that this module does not implement."""
    if config.layer(layer).is_dense and not config.attention_gate and not config.interleaved_rope_hf:
        return {}
    raise ValueError(
        f"llorch.model.forward: expected dense layers, got layer {layer} of a {config.family} model; "
        "call llorch.load(...).forward or llorch.model.blocks.forward "
        "(gradients: llorch.model.blocks.backward.backward, torch: llorch.load_torch "
        "or llorch.pytorch.models.families.build)"
    )


def forward(
    ids: Int[np.ndarray, " seq"],
    weights: Weights,
    cache: KVCache,
    *,
    keep: Keep = lambda name, array: array,
    last_only: bool = False,
    parts_of: LayerParts = dense_only,
) -> Float[np.ndarray, "rows vocab"]:
    """Run new tokens through the model, after the tokens in the cache.

    Args:
        ids: New token ids.
        weights: The model; its dtype is the dtype of the run.
        cache: Keys and values of the previous tokens; the new ones are appended.
        keep: Called with the name and the array of every stage; returns the array.
        last_only: Compute logits for the last token only.
        parts_of: Replacements of attention and feed-forward in layers that are not dense, see `llorch.model.blocks`.

    Returns:
        Logits of every new token, or of the last one.

    Raises:
        ValueError: The tokens do not fit the context, or a layer is not dense and `parts_of` is missing.
    """
    config, positions = weights.config, cache.next_positions(len(ids))
    cos, sin = rope_tables(positions, head_dim=config.rotated, theta=config.rope_theta, scaling=config.rope_scaling)
    x = keep("embed", embedding(ids, weights["embed_tokens"]))
    for i in range(config.n_layers):

        def keep_layer(name: str, array: np.ndarray, prefix: str = f"l{i}.") -> np.ndarray:
            return keep(prefix + name, array)

        parts = parts_of(config, i, positions)
        x = block(x, weights.layer(i), config, cos, sin, cache.memory(i), keep_layer, **parts)
    out_logits = logits(x[-1:] if last_only else x, weights, keep)
    cache.advance(len(ids))
    return out_logits


def block(
    x: Hidden, w: Tensors, config: ModelConfig, cos: Table, sin: Table, memory: Any, keep: Keep, *,
    mix: Callable | None = None, feed: Callable | None = None,
) -> Hidden:  # fmt: skip
    """Run one layer: add attention and feed-forward (or `mix` and `feed`) to the residual stream."""
    h = keep("attn_norm", rms_norm(x, w["attn_norm"], eps=config.rms_norm_eps))
    x = keep("attn_residual", x + (mix or attention)(h, w, config, cos, sin, memory, keep))
    h = keep("ffn_norm", rms_norm(x, w["ffn_norm"], eps=config.rms_norm_eps))
    return keep("block_out", x + (feed or feed_forward)(h, w, keep))


def attention(h: Hidden, w: Tensors, config: ModelConfig, cos: Table, sin: Table, append: Append, keep: Keep) -> Hidden:
    """Project, rotate, cache, average the values by attention, project back."""
    q, k, v = qkv(h, w, config, keep)
    q = keep("q_rope", rope(q, cos, sin))
    k = keep("k_rope", rope(k, cos, sin))
    k, v = append(k, v)  # (kv_heads, ctx, head_dim): the whole context
    k, v = keep("k_cache", k), keep("v_cache", v)
    scores = keep("attn_scores", attention_scores(q, k))
    probs = keep("attn_probs", attention_probs(scores))
    return attention_output(keep("attn_context", attention_context(probs, v)), w, keep)


def attention_output(context: Float[np.ndarray, "seq q_width"], w: Tensors, keep: Keep) -> Hidden:
    """Project the joined heads back to the hidden size."""
    return keep("attn_out", linear(context, w["o_proj"], w.get("o_bias")))


def qkv(h: Hidden, w: Tensors, config: ModelConfig, keep: Keep) -> tuple[Heads, Heads, Heads]:
    """Project to queries, keys and values, split into heads; Qwen3 normalises each head of queries and keys."""
    seq, head_dim, eps = len(h), config.head_dim, config.rms_norm_eps
    q = keep("q_proj", linear(h, w["q_proj"], w.get("q_bias"))).reshape(seq, -1, head_dim)  # (seq, heads, head_dim)
    k = keep("k_proj", linear(h, w["k_proj"], w.get("k_bias"))).reshape(seq, -1, head_dim)  # (seq, kv_heads, head_dim)
    v = keep("v_proj", linear(h, w["v_proj"], w.get("v_bias"))).reshape(seq, -1, head_dim)  # (seq, kv_heads, head_dim)
    if config.qk_norm:
        q = keep("q_norm", rms_norm(q, w["q_norm"], eps=eps))
        k = keep("k_norm", rms_norm(k, w["k_norm"], eps=eps))
    return q, k, v


def feed_forward(h: Hidden, w: Tensors, keep: Keep) -> Hidden:
    """Apply the SwiGLU feed-forward: gate and up projections, then down."""
    gate = keep("ffn_gate", linear(h, w["gate_proj"]))
    up = keep("ffn_up", linear(h, w["up_proj"]))
    return keep("ffn_out", linear(keep("ffn_act", swiglu(gate, up)), w["down_proj"]))


def logits(x: Float[np.ndarray, "rows hidden"], weights: Weights, keep: Keep) -> Float[np.ndarray, "rows vocab"]:
    """Apply the final norm, then the output matrix; tied embeddings use the embedding matrix."""
    x = keep("final_norm", rms_norm(x, weights["final_norm"], eps=weights.config.rms_norm_eps))
    return keep("logits", linear(x, weights["embed_tokens" if weights.config.tie_word_embeddings else "lm_head"]))
