"""What a layer can contain beyond the dense one: experts, a delta net, windows, layers without RoPE.

Data alone: `llorch.families.config` reads it from a file, `llorch.model.blocks` computes it, the stage table and the
table of weights ask for it by *trait*, one word for each thing that a layer has.

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
    """Some feed-forward parts of which a router chooses a few for each token."""

    n_experts: int
    n_experts_per_token: int  # 1 to n_experts
    expert_size: int  # width of each
    shared_size: int = 0  # width of the one that every token has; 0: none
    shared_gate: bool = False  # what the shared one adds is multiplied by a sigmoid
    norm_topk_prob: bool = True  # weights of the chosen ones are divided by their sum
    scaled_inputs: bool = False  # Llama 4: sigmoid of the chosen logits, multiplies what an expert is given


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A layer whose memory is one matrix per head, written by the gated delta rule."""

    conv_kernel: int  # tokens that the convolution sees; the state holds one less
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
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_size(self) -> int:
        """Numbers that a layer remembers, however many tokens there were."""
        return (self.conv_kernel - 1) * self.conv_width + self.value_width * self.key_head_dim


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries grow with the position: 1 + scale * ln(1 + floor((position + offset) / floor))."""

    scale: float  # > 0
    floor: int  # positions that are left as they are
    offset: int  # 1 in Llama 4, 0 in Ministral 3

    def of(self, positions: Int[np.ndarray, " seq"]) -> Float64[np.ndarray, " seq"]:
        """Compute the factor of each position."""
        return 1 + self.scale * np.log1p(np.floor((positions + self.offset) / self.floor))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer is; without arguments a dense one."""

    mixer: Mixer = "attention"
    experts: bool = False
    rope: bool = True
    head_norm: bool = False  # Llama 4: every query and key head divided by its root mean square, after RoPE
    has_attention_temperature: bool = False  # queries are multiplied by the Temperature of the model
    window: int | None = None  # a token sees itself and the window - 1 before it
    chunk: int | None = None  # a token sees those of its own chunk: positions with the same position // chunk

    @property
    def is_dense(self) -> bool:
        """True if the layer is a plain dense one, so that `llorch.model.forward` alone computes it."""
        return self == Layer()

    @property
    def looks_at_positions(self) -> bool:
        """True if attention uses positions unlike a dense layer: no RoPE, a temperature, a window or chunks."""
        return not self.rope or self.has_attention_temperature or self.bound is not None

    @property
    def bound(self) -> Bound | None:
        """Return the limit on how far back a token sees; None if it sees all earlier tokens."""
        if self.window is not None:
            return "window", self.window
        return None if self.chunk is None else ("chunk", self.chunk)

    def seen_from(self, positions: Int[np.ndarray, " seq"]) -> Int[np.ndarray, " seq"] | None:
        """Find the first position that each token may see; None: all of them may see the first."""
        if self.window is not None:
            return np.maximum(positions - self.window + 1, 0)
        return None if self.chunk is None else positions // self.chunk * self.chunk
