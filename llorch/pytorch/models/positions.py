"""Attention with other rules for positions, or with a gate.

Windows and chunks change the mask. Layers without RoPE, temperature (a factor of the queries by position) and Llama 4's
head norm replace the rotation between projections and cache. Sums and rotations are at least float32, rounded once.

Qwen3-Next and Qwen3.5 multiply the context by a sigmoid. For each query head, `q_proj` has the rows of the query, then
the rows of the gate. Everything else is attention as in `causal_lm`.

Source: transformers `modeling_{mistral,qwen2,smollm3,ministral3,llama4}.py`; `modeling_qwen3_next.py`,
Qwen3NextAttention.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Attention, Context, Heads, Hidden, Keep, rope, widened


class AttentionByPosition(Attention):
    """Dense attention with the mask and the rotation of one layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build the modules of one layer."""
        super().__init__(config, layer)
        rules = config.layer(layer)
        self.bound = rules.bound
        if not rules.rope or rules.has_attention_temperature or rules.head_norm or config.interleaved_rope_hf:
            self.rotate = Rotation(config, layer)

    def forward(self, h: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the array that attention adds to the residual stream."""
        layer_place = place if self.bound is None else replace(place, visible=place.near[self.bound])
        return super().forward(h, layer_place, cache, keep)


class Rotation(nn.Module):
    """Replacement of `rotate_and_cache`: optional rotation, head norm and temperature, then the cache."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Read the rules of the layer."""
        super().__init__()
        rules = config.layer(layer)
        self.rope: Any = None if not rules.rope else rope_adjacent if config.interleaved_rope_hf else rope
        self.head_norm: Any = HeadNorm(config.rms_norm_eps) if rules.head_norm else None
        self.has_attention_temperature = rules.has_attention_temperature

    def forward(
        self, q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
    ) -> tuple[Heads, Context, Context]:
        """Return the queries, and the keys and values of the whole context."""
        if self.rope is not None:
            q = keep("q_rope", self.rope(q, place.cos, place.sin))
            k = keep("k_rope", self.rope(k, place.cos, place.sin))
        if self.head_norm is not None:
            q, k = keep("q_head_norm", self.head_norm(q)), keep("k_head_norm", self.head_norm(k))
        if self.has_attention_temperature and place.heat is not None:
            q = keep("q_tempered", (widened(q) * place.heat[:, :, None, None]).to(q.dtype))
        keys, values = cache.append(layer, k, v, place)
        return q, keep("k_cache", keys), keep("v_cache", values)


class HeadNorm(nn.Module):
    """RMSNorm without a gain."""

    def __init__(self, eps: float) -> None:
        """Set eps, which is added to the mean square."""
        super().__init__()
        self.eps = eps

    def forward(self, x: Heads) -> Heads:
        """Normalise every head to unit root mean square."""
        x_wide = widened(x)
        return (x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rope_adjacent(x: Heads, cos: Float[Tensor, "batch seq half"], sin: Float[Tensor, "batch seq half"]) -> Heads:
    """Rotate the pairs (2j, 2j + 1) of every head by the angle of the token's position."""
    first, second = widened(x).unflatten(-1, (-1, 2)).unbind(-1)  # (batch, seq, heads, half) each
    cos, sin = cos[:, :, None], sin[:, :, None]  # (batch, seq, 1, half)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


class GatedAttention(Attention):
    """Attention whose context is multiplied by a sigmoid gate before the output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build the modules of one layer."""
        super().__init__(config, layer)
        self.q_proj: Any = nn.Linear(config.hidden_size, 2 * config.q_width, bias=config.qkv_bias)
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid

    def forward(self, h: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the array that attention adds to the residual stream."""
        q, gate = keep("q_gate_proj", self.q_proj(h)).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k = keep("k_proj", self.k_proj(h)).unflatten(-1, (-1, self.head_dim))  # (batch, seq, kv_heads, head_dim)
        v = keep("v_proj", self.v_proj(h)).unflatten(-1, (-1, self.head_dim))  # (batch, seq, kv_heads, head_dim)
        if self.q_norm is not None:
            q, k = keep("q_norm", self.q_norm(q)), keep("k_norm", self.k_norm(k))
        q, keys, values = self.rotate(q, k, v, self.layer, place, cache, keep)
        context = keep("attn_context", self.attend(q, keys, values, place.visible, keep).flatten(-2))
        gate = keep("attn_gate", self.sigmoid(widened(gate)).flatten(-2))  # (batch, seq, q_width)
        return keep("attn_out", self.o_proj(keep("attn_gated", (context * gate).to(h.dtype))))
