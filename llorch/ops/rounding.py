"""Rounding of activations before a matrix product in ggml's CPU backend.

ggml rounds each row of activations to a type that depends only on the type of the weights:

    F16, BF16    nearest value, ties to even
    Q8_0, Q8_1   blocks of 32:  d = max|x| / 127,  code = round(x / d),  d kept as float16
    Q8_K         blocks of 256: 1/d = -127 / x_m,  code = round(x / d),  d kept as float32; x_m is the x of the
                 largest magnitude, the first one at a tie

The codes of Q8_0 and Q8_1 depend on the build in the last bit, see `VARIANTS`.
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
_ELEMENTS_AT_ONCE = 1 << 16  # so that temporaries stay in the processor cache


@dataclass(frozen=True, slots=True)
class GgmlBuild:
    """Arithmetic of the codes of Q8_0 and Q8_1 in one build of ggml."""

    from_maximum: bool  # multiply x by 127 / max|x|; otherwise by 1 / d, which is rounded twice
    half_away: bool  # round halves away from zero; otherwise to even
    overflow_code: int  # every code of a block so small that the factor is infinite; its d is 0 in float16


# On NEON the code of an overflow depends on the sign of x; the block's scale is 0, so 0 is used for both signs.
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
    """Replace every activation by the value that ggml multiplies.

    Args:
        x: Activations; float64 is rounded to float32 first, because ggml's activations are float32.
        kind: Type that ggml rounds to; the width must be a multiple of its block size.
        variant: The build of ggml, a key of `VARIANTS`; by default that of this machine's processor.

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

    Returns the codes, and the stored scale of each block: float16 for Q8_0 and Q8_1, float32 for Q8_K.
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
                underflowed = np.flatnonzero(
                    scale == 0
                )  # here blocks that are not 0 but have codes 0, see `_fill_codes`
                underflowed = underflowed[source[underflowed].any(axis=1) & ~target[underflowed].any(axis=1)]
                target[underflowed] = VARIANTS[variant].overflow_code
    return codes, scales


def block_sums(
    x: Float[np.ndarray, "*rows width"], variant: VariantName = HOST_VARIANT
) -> Float32[np.ndarray, "*rows blocks"]:
    """Compute s of every Q8_1 block, d * sum(codes) as float16; unlike in `round_activations`, d is not rounded."""
    sums = np.empty((*x.shape[:-1], x.shape[-1] // 32), np.float32)
    ones = np.ones(32, np.float32)
    with np.errstate(all="ignore"):
        for source, target in _chunks(_blocks(x, 32), sums.reshape(-1)):
            codes = np.empty_like(source)
            scales = _fill_codes(source, codes, "Q8_1", variant)
            target[:] = (codes @ ones * scales).astype(np.float16)  # a sum of 32 codes is exact in any order
    return sums


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    # In two steps, so that a width that is no multiple of the block size raises an error.
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size).reshape(-1, size)


def _chunks(blocks: np.ndarray, *parallel: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield slices of the blocks, in float32, and of the parallel arrays, small enough for the processor cache."""
    step = max(1, _ELEMENTS_AT_ONCE // blocks.shape[1])
    for start in range(0, len(blocks), step):
        chunk = slice(start, start + step)
        yield blocks[chunk].astype(np.float32, copy=False), *(array[chunk] for array in parallel)


def _fill_codes(source: np.ndarray, codes: np.ndarray, kind: BlockKind, variant: VariantName) -> np.ndarray:
    """Write the codes as floats and return the scales in float32; codes are 0 where the factor is infinite."""
    if kind == "Q8_K":
        return _fill_codes_of_256(source, codes)
    return _fill_codes_of_32(source, codes, VARIANTS[variant])


def _fill_codes_of_32(source: np.ndarray, codes: np.ndarray, variant: GgmlBuild) -> np.ndarray:
    # The transpose makes NumPy's maximum run along long rows, three times as fast.
    maximum = np.abs(source.T, order="C").max(axis=0)
    scale = maximum / np.float32(127)
    factor = np.float32(127) / maximum if variant.from_maximum else np.float32(1) / scale
    factor[np.isinf(factor)] = 0  # a block of zeros, or of denormals, whose stored scale is 0
    np.multiply(source, factor[:, None], out=codes)
    (_round_half_away if variant.half_away else _round_half_even)(codes)
    return scale


def _fill_codes_of_256(source: np.ndarray, codes: np.ndarray) -> np.ndarray:
    first_largest = np.abs(source).argmax(axis=1)
    extreme = source[np.arange(len(source)), first_largest]
    inverse = np.float32(-127) / extreme
    scale = np.where(extreme == 0, np.float32(0), 1 / inverse)
    inverse[np.isinf(inverse)] = 0  # a block of zeros, or of denormals, whose codes are 0
    np.multiply(source, inverse[:, None], out=codes)
    _round_half_even(codes)
    return scale


def _stored_scales(scales: np.ndarray, kind: str) -> np.ndarray:
    return scales if kind == "Q8_K" else scales.astype(np.float16)


def _round_half_even(values: np.ndarray) -> None:
    np.rint(values, out=values)


def _round_half_away(values: np.ndarray) -> None:
    integers = np.trunc(values)
    values -= integers  # exact, and so is the doubling
    values += values
    np.trunc(values, out=values)  # -1, 0 or 1
    values += integers


def _round_to_float16(source: np.ndarray, target: np.ndarray) -> None:
    """Round to the nearest float16, ties to even, four times as fast as NumPy's cast.

    In the binade 2^e, float16 has the multiples of 2^(e-10), and of 2^-24 below 2^-14. Adding and subtracting
    2^(e+13) rounds to these multiples, because the float32 spacing there is 2^(e-10).
    """
    magnitude = np.abs(source)
    if not magnitude.max() < 65520:  # 65520 and above round to infinity
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
    """Round to the nearest bfloat16, the upper half of the float32 bits, ties to even."""
    bits = source.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded &= np.uint32(0xFFFF_0000)
    target[...] = rounded.view(np.float32)
