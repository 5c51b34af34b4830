"""Parts of a layer that a dense layer does not have: experts, a delta net, windows, chunks, no RoPE.

This module has only data. `llorch.families.config` has it for a model, `llorch.model.blocks` computes it. The tables of
weights and of stages (named intermediate arrays) select by *trait*, one word for each part of a layer.

Source: transformers `configuration_{qwen2_moe,qwen3_moe,qwen3_next,qwen3_5,llama4,smollm3,ministral3}.py`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int

Mixer = Literal["attention", "delta_net"]
Bound = tuple[Literal["window", "chunk"], int]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts: feed-forward blocks, of which a router selects some for each token."""

    n_experts: int
    n_experts_per_token: int  # 1 to n_experts
    expert_size: int  # width of one expert
    shared_size: int = 0  # width of the shared expert, which every token uses; 0: none
    shared_gate: bool = False  # the output of the shared expert is multiplied by a sigmoid
    norm_topk_prob: bool = True  # weights of the selected experts are divided by their sum
    scaled_inputs: bool = False  # Llama 4: the sigmoid of a selected logit multiplies the expert's input


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Linear attention layer with one state matrix per head, updated by the gated delta rule."""

    conv_kernel: int  # tokens in the convolution; its state has one less
    n_key_heads: int
    n_value_heads: int  # a multiple of n_key_heads
    key_head_dim: int
    value_head_dim: int

    @property
    def key_width(self) -> int:
        """Width of all key (or query) heads joined."""
        return self.n_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads joined."""
        return self.n_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Number of channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_size(self) -> int:
        """Size of a layer's state, which does not depend on the number of tokens."""
        return (self.conv_kernel - 1) * self.conv_width + self.value_width * self.key_head_dim


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Attention temperature, a factor of queries: 1 + scale * ln(1 + floor((position + offset) / floor))."""

    scale: float  # > 0
    floor: int  # number of positions with factor 1
    offset: int  # 1 in Llama 4, 0 in Ministral 3

    def of(self, positions: Int[np.ndarray, " seq"]) -> Float64[np.ndarray, " seq"]:
        """Compute the factor of each position."""
        return 1 + self.scale * np.log1p(np.floor((positions + self.offset) / self.floor))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Description of one layer; the defaults are a dense layer."""

    mixer: Mixer = "attention"
    experts: bool = False
    rope: bool = True
    head_norm: bool = False  # Llama 4: every query and key head divided by its root mean square, after RoPE
    has_attention_temperature: bool = False  # queries are multiplied by the Temperature of the model
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    chunk: int | None = None  # a token attends to tokens of its chunk, which have an equal position // chunk

    @property
    def is_dense(self) -> bool:
        """True if the layer is dense, so that `llorch.model.forward` computes it without `blocks`."""
        return self == Layer()

    @property
    def uses_positions(self) -> bool:
        """True if attention uses positions unlike a dense layer: no RoPE, a temperature, a window or chunks."""
        return not self.rope or self.has_attention_temperature or self.bound is not None

    @property
    def bound(self) -> Bound | None:
        """Limit of attention, a window or chunk; None if a token attends to all earlier tokens."""
        if self.window is not None:
            return "window", self.window
        return None if self.chunk is None else ("chunk", self.chunk)

    def seen_from(self, positions: Int[np.ndarray, " seq"]) -> Int[np.ndarray, " seq"] | None:
        """Return the first position to which each token attends; None if there is no limit."""
        if self.window is not None:
            return np.maximum(positions - self.window + 1, 0)
        return None if self.chunk is None else positions // self.chunk * self.chunk
