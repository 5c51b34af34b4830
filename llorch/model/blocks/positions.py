"""Attention in layers with windows, chunks, no RoPE, or a temperature.

    scores[t, s] = -inf     for keys s before the first key of token t: t - window + 1, or the start of its chunk
    q = q * (1 + scale * ln(1 + floor((position + offset) / floor)))            after RoPE, in layers with a temperature

Mistral and Qwen2 have windows; SmolLM3 has no RoPE in every fourth layer; Ministral 3 has a temperature in all layers.

Source: arXiv:2310.06825 (windows), arXiv:2501.18795 (no RoPE), arXiv:2501.19399 (temperature);
transformers `modeling_{mistral,qwen2,smollm3,ministral3}.py`.
"""

import numpy as np
from jaxtyping import Int

from llorch.families.config import ModelConfig
from llorch.families.layers import Layer
from llorch.model.forward import Append, Heads, Hidden, Keep, Table, Tensors, attention_output, qkv
from llorch.ops.attention import attention_context, attention_probs, attention_scores
from llorch.ops.rope import rope


def attention(
    h: Hidden, w: Tensors, config: ModelConfig, cos: Table, sin: Table, append: Append, keep: Keep, *,
    layer: Layer, positions: Int[np.ndarray, " seq"],
) -> Hidden:  # fmt: skip
    """Project, rotate if the layer has RoPE, attend."""
    q, k, v = qkv(h, w, config, keep)
    if layer.rope:
        q = keep("q_rope", rope(q, cos, sin))
        k = keep("k_rope", rope(k, cos, sin))
    return attend(q, k, v, w, config, append, keep, layer=layer, positions=positions)


def attend(
    q: Heads, k: Heads, v: Heads, w: Tensors, config: ModelConfig, append: Append, keep: Keep, *,
    layer: Layer, positions: Int[np.ndarray, " seq"],
) -> Hidden:  # fmt: skip
    """Apply the temperature, cache, average the values of each token's window or chunk, project back."""
    if layer.has_attention_temperature and config.temperature is not None:
        q = keep("q_tempered", (q * config.temperature.of(positions)[:, None, None]).astype(q.dtype))
    k, v = append(k, v)  # (kv_heads, ctx, head_dim): the whole context
    k, v = keep("k_cache", k), keep("v_cache", v)
    scores = keep("attn_scores", attention_scores(q, k, seen_from(layer, positions, k.shape[1])))
    probs = keep("attn_probs", attention_probs(scores))
    return attention_output(keep("attn_context", attention_context(probs, v)), w, keep)


def seen_from(layer: Layer, positions: Int[np.ndarray, " seq"], ctx: int) -> Int[np.ndarray, " seq"] | None:
    """Return the index in the context of the first key that each token attends to; None for no limit."""
    first = layer.seen_from(positions)
    return None if first is None else first - (positions[-1] + 1 - ctx)
