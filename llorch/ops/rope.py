"""RoPE: rotate each pair of elements of a head by an angle proportional to the position.

    angle[p, j] = p * inv_freq[j]            inv_freq[j] = theta ** (-2 j / head_dim)
    y[j]        = x[j] cos - x[j + half] sin
    y[j + half] = x[j + half] cos + x[j] sin          half = head_dim / 2
    dL/dx = dL/dy rotated by -angle, because the transpose of a rotation is its inverse

Pairs are (j, j + half), the Hugging Face order; Llama GGUF files store them interleaved, and `files/tensor_names.py`
reorders them. Only Llama 4 uses pairs (2j, 2j + 1) everywhere: `rope_adjacent`. Scaling for longer contexts changes
inv_freq only (YaRN also scales cos and sin).

Source: arXiv:2104.09864; llama3, linear and yarn: transformers `modeling_rope_utils.py`; arXiv:2309.00071.
"""

import math

import numpy as np
from jaxtyping import Float, Float64, Int

from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from llorch.ops.precision import widen


def rope(
    x: Float[np.ndarray, "seq heads head_dim"],
    cos: Float64[np.ndarray, "seq half"],
    sin: Float64[np.ndarray, "seq half"],
) -> Float[np.ndarray, "seq heads head_dim"]:
    """Rotate every head of every token.

    Args:
        x: Queries or keys, half-split pairs. Dimensions after the rotated pairs (partial rotary) are copied.
        cos: Cosines of the tokens' angles.
        sin: Sines of the tokens' angles.

    Returns:
        The rotated heads, shape and dtype of `x`.
    """
    (wide_x,) = widen(x)
    half = cos.shape[-1]
    first, second = wide_x[..., :half], wide_x[..., half : 2 * half]  # (seq, heads, half) each
    cos, sin = (table.astype(wide_x.dtype, copy=False)[:, None, :] for table in (cos, sin))  # (seq, 1, half)
    rotated = np.empty(x.shape, x.dtype)
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half : 2 * half] = second * cos + first * sin
    rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated


def rope_adjacent(
    x: Float[np.ndarray, "seq heads head_dim"],
    cos: Float64[np.ndarray, "seq half"],
    sin: Float64[np.ndarray, "seq half"],
) -> Float[np.ndarray, "seq heads head_dim"]:
    """Rotate every head of every token, with interleaved pairs (2j, 2j + 1).

    Args:
        x: Queries or keys.
        cos: Cosines of the tokens' angles.
        sin: Sines of the tokens' angles.

    Returns:
        The rotated heads, shape and dtype of `x`.
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    halves = pairs.swapaxes(-1, -2).reshape(x.shape)  # (j, j + half)
    rotated = rope(halves, cos, sin).reshape(*x.shape[:-1], 2, -1)
    return np.ascontiguousarray(rotated.swapaxes(-1, -2)).reshape(x.shape)


def rope_backward(
    grad: Float[np.ndarray, "seq heads head_dim"],
    cos: Float64[np.ndarray, "seq half"],
    sin: Float64[np.ndarray, "seq half"],
) -> Float[np.ndarray, "seq heads head_dim"]:
    """Rotate the gradient of every head back, with the tables of the forward pass."""
    return rope(grad, cos, -sin)


def rope_adjacent_backward(
    grad: Float[np.ndarray, "seq heads head_dim"],
    cos: Float64[np.ndarray, "seq half"],
    sin: Float64[np.ndarray, "seq half"],
) -> Float[np.ndarray, "seq heads head_dim"]:
    """Rotate the gradient of every head back, with interleaved pairs."""
    return rope_adjacent(grad, cos, -sin)


def rope_tables(
    positions: Int[np.ndarray, " seq"],
    *,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
) -> tuple[Float64[np.ndarray, "seq half"], Float64[np.ndarray, "seq half"]]:
    """Compute the cosines and sines of absolute positions, 0 and up.

    They stay in float64: a float32 angle at position 4000 already has an error of 1e-4.
    """
    inv_freq = scale_frequencies(frequencies(head_dim, theta), scaling, head_dim=head_dim, theta=theta)
    angle = positions[:, None] * inv_freq  # (seq, half)
    gain = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return np.cos(angle) * gain, np.sin(angle) * gain


def frequencies(head_dim: int, theta: float) -> Float64[np.ndarray, " half"]:
    """Compute the radians per position of each pair, before any scaling."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def scale_frequencies(
    inv_freq: Float64[np.ndarray, " half"], scaling: RopeScaling | None, *, head_dim: int, theta: float
) -> Float64[np.ndarray, " half"]:
    """Apply the scaling of the config to the frequencies."""
    match scaling:
        case None:
            return inv_freq
        case LinearScaling(factor=factor):
            return inv_freq / factor
        case FactorScaling(factors=factors):
            return inv_freq / np.asarray(factors)
        case Llama3Scaling():
            return inv_freq / llama3_factors(inv_freq, scaling)
        case YarnScaling():
            unscaled_share = yarn_kept_share(scaling, head_dim=head_dim, theta=theta)
            return inv_freq * unscaled_share + inv_freq / scaling.factor * (1 - unscaled_share)


def llama3_factors(inv_freq: Float64[np.ndarray, " half"], scaling: Llama3Scaling) -> Float64[np.ndarray, " half"]:
    """Compute the divisor of each frequency: 1 for high ones, `factor` for low ones, with a ramp between."""
    n_turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)  # per original context
    width = scaling.high_freq_factor - scaling.low_freq_factor
    ramp = (n_turns - scaling.low_freq_factor) / (width or 1e-30)  # equal factors, as in Llama 4, make a step
    unscaled_share = np.clip(ramp, 0, 1)
    return 1 / ((1 - unscaled_share) / scaling.factor + unscaled_share)


def yarn_kept_share(scaling: YarnScaling, *, head_dim: int, theta: float) -> Float64[np.ndarray, " half"]:
    """Compute the unscaled share of each frequency in YaRN, from 1 for high ones to 0 for low ones."""
    start, end = scaling.ramp(head_dim=head_dim, theta=theta)
    ramp = (np.arange(head_dim // 2, dtype=np.float64) - start) / (
        end - start or 0.001
    )  # 0.001 as in llama.cpp, transformers
    return 1 - np.clip(ramp, 0, 1)
