"""Rounding of activations, cached keys and values by the scheme of a quantised Hugging Face folder.

    s   the scale of a matrix, of a row, or of a group of neighbouring columns
    q   round(clip(x / s)) to the format of the codes; ties to even
    x'  q * s, which replaces x in the product

A static scale is stored in the folder. Other scales come from amax, the largest magnitude of their row or group:

    dynamic   s = amax / half, half of the range of the codes: 127.5 for int8, 448 for E4M3
    e8m0      s = 2^(e - o), 2^e = amax rounded down to a power of two (up from 1.75 * 2^e), o = 8 for E4M3, 2 for E2M1
    e4m3      s = E4M3(G * amax / 6) / G with the global scale G of the folder

A scale of 0 becomes the epsilon of the dtype; an E4M3 scale of 0 becomes 1/8. A number is rounded to float32 before it
is rounded to E4M3, because engines have no cast from float64. torchao's dynamic scales are at least the epsilon of
float32, and it computes q = clip(round(x * (1 / s))): the product may lie on the other side of a tie than the quotient.

Source: compressed-tensors 0.20 `quantization/utils/helpers.py` (calculate_qparams), `mxfp_utils.py`, `fp4_utils.py` and
`lifecycle/forward_helpers.py` (_quantize_dequantize); torchao 0.18 `quantization/quant_primitives.py`
(_choose_qparams_affine, _quantize_affine_no_dtype_cast); OCP Microscaling Formats (MX) v1.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from jaxtyping import Float

CodesName = Literal["int4", "int8", "E2M1", "E4M3"]
LEAST_SCALE = 2.0**-23  # epsilon of float32, which torchao uses for every dtype


@dataclass(frozen=True, slots=True)
class Codes:
    """Range and rounding of one code format."""

    lowest: float
    highest: float
    exponent: int  # floor(log2(highest)): the power of two that E8M0 scales do not cover
    rounded: Callable[[np.ndarray], np.ndarray]  # rounds numbers in range to the nearest code


@dataclass(frozen=True, slots=True)
class SchemeRounding:
    """Rounding rule of one scheme: code format, and the source of the scales."""

    codes: CodesName
    scales: Literal["static", "dynamic", "e8m0", "e4m3"]
    group: int | None = None  # columns that share a scale; None: the whole row
    number: float = 1.0  # the static scale, or the global scale of E4M3 scales
    by_reciprocal: bool = False  # torchao's dynamic scales: at least `LEAST_SCALE`, and x is multiplied by 1 / s

    def __str__(self) -> str:
        """Format the rule, as in `int8, dynamic scale per token`."""
        if self.scales == "static":
            return f"{self.codes}, static scale"
        return f"{self.codes}, {self.scales} scale per {'token' if self.group is None else f'{self.group} columns'}"


def round_as_scheme(x: Float[np.ndarray, "*rows width"], rule: SchemeRounding) -> Float[np.ndarray, "*rows width"]:
    """Replace every activation by the value that the scheme multiplies, computed in the dtype of `x`.

    Args:
        x: Activations; the width must be a multiple of the group size.
        rule: Code format and source of the scales.

    Returns:
        Code times scale. NaN stays NaN.
    """
    codes, groups = CODES[rule.codes], x.reshape(*x.shape[:-1], -1, rule.group or x.shape[-1])
    with np.errstate(all="ignore"):
        scale = _scales(groups, rule, codes)
        quotient = groups * (1 / scale) if rule.by_reciprocal else groups / scale
        rounded = codes.rounded(np.clip(quotient, codes.lowest, codes.highest)) * scale
    return rounded.astype(x.dtype, copy=False).reshape(x.shape)


def _scales(groups: np.ndarray, rule: SchemeRounding, codes: Codes) -> np.ndarray | float:
    """Compute the scales of the groups, with an axis of one for their columns."""
    if rule.scales == "static":
        return rule.number
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    if rule.scales == "e8m0":
        return _power_of_two(largest, codes.exponent)
    scale = largest / ((codes.highest - codes.lowest) / 2)
    if rule.by_reciprocal:
        return np.maximum(scale, scale.dtype.type(LEAST_SCALE))
    if rule.scales == "dynamic":
        return np.where(scale == 0, np.finfo(scale.dtype).eps, scale)
    e4m3_scale = to_e4m3(np.clip(scale * rule.number, -448, 448))
    return np.where(e4m3_scale == 0, scale.dtype.type(0.125), e4m3_scale) / rule.number


def _power_of_two(largest: np.ndarray, exponent: int) -> np.ndarray:
    mantissa, power = np.frexp(largest)  # mantissa in [0.5, 1)
    power = np.where(largest > 0, power - 1 + (mantissa >= 0.875) - exponent, -127)
    return np.ldexp(largest.dtype.type(1), np.clip(power, -127, 128))


def to_e4m3(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Round numbers of magnitude 448 and less to float32, then to the nearest E4M3."""
    return _to_minifloat(x.astype(np.float32, copy=False), mantissa_bits=3, least_exponent=-6).astype(x.dtype)


def to_e2m1(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Round numbers of magnitude 6 and less to the nearest E2M1."""
    return _to_minifloat(x, mantissa_bits=1, least_exponent=0)


def _to_minifloat(x: np.ndarray, *, mantissa_bits: int, least_exponent: int) -> np.ndarray:
    """Round each number to a multiple of 2^(e - mantissa_bits), where 2^e is its binade."""
    step = np.maximum(np.frexp(x)[1] - 1, least_exponent) - mantissa_bits
    return np.ldexp(np.rint(np.ldexp(x, -step)), step)


CODES: Mapping[CodesName, Codes] = MappingProxyType(
    {
        "int4": Codes(-8.0, 7.0, 2, np.rint),
        "int8": Codes(-128.0, 127.0, 6, np.rint),
        "E2M1": Codes(-6.0, 6.0, 2, to_e2m1),
        "E4M3": Codes(-448.0, 448.0, 8, to_e4m3),
    }
)
