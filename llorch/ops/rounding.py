"""Activations as a matrix product of ggml's CPU backend sees them: rounded to suit the type of the weights.

ggml rounds each row of activations before it multiplies, and to what depends on the weights' type alone:

    F16, BF16    each value to the nearest, ties to even
    Q8_0, Q8_1   blocks of 32:  d = max|x| / 127,  code = round(x / d),  d kept as float16
    Q8_K         blocks of 256: 1/d = -127 / x_m,  code = round(x / d),  d kept as float32; x_m is the x of the
                 largest magnitude, the first one at a tie

For Q8_0 and Q8_1 the code is computed in ways that differ from build to build in the last bit, see `VARIANTS`.
Q8_1 also keeps s = d * sum(codes) of each block, rounded to float16; weights with a minimum are multiplied by s.

Source: llama.cpp ggml/src/ggml-quants.c (quantize_row_q8_0_ref, _q8_1_ref, _q8_K_ref) and
ggml/src/ggml-cpu/arch/{x86,arm}/quants.c, as of ggml 0.25.
"""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int8

ActivationKind = Literal["F32", "F16", "BF16", "Q8_0", "Q8_1", "Q8_K"]
BlockKind = Literal["Q8_0", "Q8_1", "Q8_K"]
VariantName = Literal["x86", "neon", "generic"]

BLOCK_SIZE = {"Q8_0": 32, "Q8_1": 32, "Q8_K": 256}
_ELEMENTS_AT_ONCE = 1 << 16  # the temporaries then stay in the processor cache


@dataclass(frozen=True, slots=True)
class GgmlBuild:
    """How one build of ggml computes the codes of Q8_0 and Q8_1."""

    from_maximum: bool  # x is multiplied by 127 / max|x|; otherwise by 1 / d, which is rounded twice
    half_away: bool  # halves are rounded away from zero; otherwise to even
    overflow_code: int  # every code of a block so small that the factor is infinite; d is 0 in float16 there


# What overflow makes on NEON depends on the sign of x. It is multiplied by 0 all the same.
VARIANTS: Mapping[VariantName, GgmlBuild] = MappingProxyType(
    {
        "x86": GgmlBuild(from_maximum=True, half_away=False, overflow_code=-128),
        "neon": GgmlBuild(from_maximum=False, half_away=False, overflow_code=0),
        "generic": GgmlBuild(from_maximum=False, half_away=True, overflow_code=0),
    }
)
_MACHINES: dict[str, VariantName] = {"x86_64": "x86", "amd64": "x86", "arm64": "neon", "aarch64": "neon"}
HOST_VARIANT: VariantName = _MACHINES.get(platform.machine().lower(), "generic")


def round_activations(
    x: Float[np.ndarray, "*rows width"], kind: ActivationKind, variant: VariantName = HOST_VARIANT
) -> Float[np.ndarray, "*rows width"]:
    """Replace every activation by the value that ggml multiplies with.

    Args:
        x: Activations; float64 ones are rounded to float32 first, since ggml never has more.
        kind: What ggml rounds to; the width is a whole number of its blocks.
        variant: The build of ggml, a key of `VARIANTS`.

    Returns:
        Code times scale, in the dtype of `x`. This is exact, except for Q8_K in float32, whose product is rounded.
        Scales beyond the range of float16 give inf and NaN, as in ggml.
    """
    if kind == "F32":
        return x.astype(np.float32, copy=False).astype(x.dtype, copy=False)
    rounded = np.empty(x.shape, x.dtype)
    size = BLOCK_SIZE.get(kind, 1)
    with np.errstate(all="ignore"):
        for source, target in _chunks(_blocks(x, size), _blocks(rounded, size)):
            if kind == "F16":
                _round_to_float16(source, target)
            elif kind == "BF16":
                _round_to_bfloat16(source, target)
            else:
                target *= _stored_scales(_fill_codes(source, target, kind, variant), kind).astype(x.dtype)[:, None]
    return rounded


def quantize_blocks(
    x: Float[np.ndarray, "*rows width"], kind: BlockKind, variant: VariantName = HOST_VARIANT
) -> tuple[Int8[np.ndarray, "*rows width"], Float[np.ndarray, "*rows blocks"]]:
    """Quantise finite activations as ggml does, byte for byte; see `round_activations`.

    Gives the codes, and the scale of each block as it is stored: float16 for Q8_0 and Q8_1, float32 for Q8_K.
    """
    size = BLOCK_SIZE[kind]
    codes = np.empty(x.shape, np.int8)
    scales = np.empty((*x.shape[:-1], x.shape[-1] // size), np.float32 if kind == "Q8_K" else np.float16)
    with np.errstate(all="ignore"):
        for source, target, scale in _chunks(_blocks(x, size), _blocks(codes, size), scales.reshape(-1)):
            floats = np.empty_like(source)
            scale[:] = _stored_scales(_fill_codes(source, floats, kind, variant), kind)
            target[:] = floats
            if kind != "Q8_K":
                lost = np.flatnonzero(scale == 0)
                lost = lost[source[lost].any(axis=1) & ~target[lost].any(axis=1)]
                target[lost] = VARIANTS[variant].overflow_code
    return codes, scales


def block_sums(
    x: Float[np.ndarray, "*rows width"], variant: VariantName = HOST_VARIANT
) -> Float32[np.ndarray, "*rows blocks"]:
    """Compute s of every Q8_1 block, d * sum(codes) as float16; ggml multiplies it with the minimum of Q4_1 and Q5_1.

    The d in it is not rounded, unlike that of `round_activations`.
    """
    sums = np.empty((*x.shape[:-1], x.shape[-1] // 32), np.float32)
    ones = np.ones(32, np.float32)
    with np.errstate(all="ignore"):
        for source, target in _chunks(_blocks(x, 32), sums.reshape(-1)):
            codes = np.empty_like(source)
            scales = _fill_codes(source, codes, "Q8_1", variant)
            target[:] = (codes @ ones * scales).astype(np.float16)  # a sum of 32 codes is exact in any order
    return sums


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    # In two steps, so that a row which is no whole number of blocks is an error.
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size).reshape(-1, size)


def _chunks(blocks: np.ndarray, *others: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the blocks in float32 and the arrays beside them, a cacheful at a time."""
    step = max(1, _ELEMENTS_AT_ONCE // blocks.shape[1])
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        yield blocks[part].astype(np.float32, copy=False), *(other[part] for other in others)


def _fill_codes(source: np.ndarray, codes: np.ndarray, kind: BlockKind, variant: VariantName) -> np.ndarray:
    """Write the codes as floats and return the scales before they are stored."""
    if kind == "Q8_K":
        return _fill_codes_of_256(source, codes)
    return _fill_codes_of_32(source, codes, VARIANTS[variant])


def _fill_codes_of_32(source: np.ndarray, codes: np.ndarray, variant: GgmlBuild) -> np.ndarray:
    # Transposed, the maximum runs along long rows, which NumPy does three times as fast.
    maximum = np.abs(source.T, order="C").max(axis=0)
    scale = maximum / np.float32(127)
    factor = np.float32(127) / maximum if variant.from_maximum else np.float32(1) / scale
    factor[np.isinf(factor)] = 0  # a block of zeros, or of denormals that the stored scale will turn into zeros
    np.multiply(source, factor[:, None], out=codes)
    (_round_half_away if variant.half_away else _round_half_even)(codes)
    return scale


def _fill_codes_of_256(source: np.ndarray, codes: np.ndarray) -> np.ndarray:
    first_largest = np.abs(source).argmax(axis=1)
    extreme = source[np.arange(len(source)), first_largest]
    inverse = np.float32(-127) / extreme
    scale = np.where(extreme == 0, np.float32(0), 1 / inverse)
    inverse[np.isinf(inverse)] = 0  # a block of zeros, or of denormals, whose codes come out as 0
    np.multiply(source, inverse[:, None], out=codes)
    _round_half_even(codes)
    return scale


def _stored_scales(scales: np.ndarray, kind: str) -> np.ndarray:
    return scales if kind == "Q8_K" else scales.astype(np.float16)


def _round_half_even(values: np.ndarray) -> None:
    np.rint(values, out=values)


def _round_half_away(values: np.ndarray) -> None:
    whole = np.trunc(values)
    values -= whole  # exact, and so is the doubling
    values += values
    np.trunc(values, out=values)  # -1, 0 or 1
    values += whole


def _round_to_float16(source: np.ndarray, target: np.ndarray) -> None:
    """Nearest float16, ties to even, without NumPy's cast, which takes four times as long.

    A number of the binade 2^e keeps its multiples of 2^(e-10), and of 2^-24 below 2^-14. Adding 2^(e+13) and
    taking it away again rounds to just that, since the float32 spacing there is 2^(e-10).
    """
    magnitude = np.abs(source)
    if not magnitude.max() < 65520:  # rounds to infinity from there on
        target[...] = source.astype(np.float16)
        return
    shift = (magnitude.view(np.uint32) & np.uint32(0x7F80_0000)).view(np.float32)  # 2^e
    np.maximum(shift, np.float32(2**-14), out=shift)
    shift *= np.float32(2**13)
    magnitude += shift
    magnitude -= shift
    signed = magnitude.view(np.uint32)
    signed |= source.view(np.uint32) & np.uint32(0x8000_0000)
    target[...] = magnitude


def _round_to_bfloat16(source: np.ndarray, target: np.ndarray) -> None:
    """Nearest upper half of the float32 bits, ties to even."""
    bits = source.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded &= np.uint32(0xFFFF_0000)
    target[...] = rounded.view(np.float32)
