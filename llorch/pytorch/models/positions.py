"""Attention where a layer treats positions otherwise: windows, chunks, no RoPE, a temperature, Llama 4.

All of that lies between the projections and the cache, where `causal_lm` rotates, and in what a token sees. Sums and
rotations are at least float32 and are rounded once, as there.

Source: transformers `modeling_{mistral,qwen2,smollm3,ministral3,llama4}.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Attention, Context, Heads, Hidden, Keep, rope, widened


class AttentionByPosition(Attention):
    """Dense attention, except for the layer's own rules about positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build the modules of one layer."""
        super().__init__(config, layer)
        this = config.layer(layer)
        self.bound = this.bound
        if not this.rope or this.has_attention_temperature or this.head_norm or config.interleaved_rope_hf:
            self.rotate = Rotation(config, layer)

    def forward(self, h: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the array that attention adds to the residual stream."""
        here = place if self.bound is None else replace(place, visible=place.near[self.bound])
        return super().forward(h, here, cache, keep)


class Rotation(nn.Module):
    """In place of `rotate_and_cache`: rotate or not, normalise heads, temper queries, write keys and values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Take what the layer says."""
        super().__init__()
        this = config.layer(layer)
        self.turn: Any = None if not this.rope else rope_adjacent if config.interleaved_rope_hf else rope
        self.head_norm: Any = HeadNorm(config.rms_norm_eps) if this.head_norm else None
        self.has_attention_temperature = this.has_attention_temperature

    def forward(
        self, q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
    ) -> tuple[Heads, Context, Context]:
        """Return the queries, and the keys and values of the whole context."""
        if self.turn is not None:
            q, k = (
                keep("q_rope", self.turn(q, place.cos, place.sin)), keep("k_rope", self.turn(k, place.cos, place.sin))
            )  # fmt: skip
        if self.head_norm is not None:
            q, k = keep("q_head_norm", self.head_norm(q)), keep("k_head_norm", self.head_norm(k))
        if self.has_attention_temperature and place.heat is not None:
            q = keep("q_tempered", (widened(q) * place.heat[:, :, None, None]).to(q.dtype))
        keys, values = cache.append(layer, k, v, place)
        return q, keep("k_cache", keys), keep("v_cache", values)


class HeadNorm(nn.Module):
    """RMSNorm without a gain."""

    def __init__(self, eps: float) -> None:
        """Keep what is added to the mean square."""
        super().__init__()
        self.eps = eps

    def forward(self, x: Heads) -> Heads:
        """Bring every head to unit root mean square."""
        wide = widened(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rope_adjacent(x: Heads, cos: Float[Tensor, "batch seq half"], sin: Float[Tensor, "batch seq half"]) -> Heads:
    """Turn the pairs (2j, 2j + 1) of every head by the angle of the token's position."""
    first, second = widened(x).unflatten(-1, (-1, 2)).unbind(-1)  # (batch, seq, heads, half) each
    cos, sin = cos[:, :, None], sin[:, :, None]  # (batch, seq, 1, half)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)
