"""Scalings of RoPE frequencies for contexts longer than those of pre-training."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`."""

    factor: float  # >= 1


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1 scaling: frequencies divided by `factor` for long wavelengths, unchanged for short, a ramp between."""

    factor: float  # >= 1
    low_freq_factor: float  # > 0
    high_freq_factor: float  # >= low_freq_factor; equal in Llama 4: a step instead of the ramp
    original_max_position_embeddings: int  # positions of pre-training


@dataclass(frozen=True, kw_only=True)
class FactorScaling:
    """One divisor per frequency, from the GGUF tensor `rope_freqs.weight`."""

    factors: tuple[float, ...]  # head_dim / 2 divisors, each > 0


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: interpolated and unscaled frequencies blended by wavelength, cos and sin multiplied by one factor."""

    factor: float  # >= 1
    original_max_position_embeddings: int  # positions of pre-training
    attention_factor: float  # multiplies cos and sin; > 0
    beta_fast: float = 32.0  # rotations above which a frequency is unchanged
    beta_slow: float = 1.0  # rotations below which a frequency is interpolated

    def ramp(self, *, head_dim: int, theta: float) -> tuple[int, int]:
        """Return the last pair whose frequency is unchanged and the first pair that is fully interpolated."""
        start, end = self.bounds(head_dim=head_dim, theta=theta)
        return max(math.floor(start), 0), min(math.ceil(end), head_dim - 1)

    def bounds(self, *, head_dim: int, theta: float) -> tuple[float, float]:
        """Return the (fractional) pair indices that rotate `beta_fast` and `beta_slow` times in pre-training."""

        def pair_with(rotations: float) -> float:
            length = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(theta))

        return pair_with(self.beta_fast), pair_with(self.beta_slow)


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling | YarnScaling


def yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """Return the paper's factor of cos and sin; llama.cpp always applies it, transformers by default."""
    return 0.1 * mscale * math.log(factor) + 1.0
