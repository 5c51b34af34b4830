"""Attention whose context is multiplied by a sigmoid: Qwen3-Next and Qwen3.5.

Beside the rows of each query head, `q_proj` has those of its gate. All else is attention as `causal_lm` has it.

Source: transformers `modeling_qwen3_next.py`, Qwen3NextAttention.
"""

from typing import Any

import torch
from torch import nn

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Attention, Hidden, Keep, widened


class GatedAttention(Attention):
    """Project, rotate, cache, mix the values of the context, gate them, project back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build the modules of one layer."""
        super().__init__(config, layer)
        self.q_proj: Any = nn.Linear(config.hidden_size, 2 * config.q_width, bias=config.qkv_bias)
        self.sigmoid: Any = torch.sigmoid

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
