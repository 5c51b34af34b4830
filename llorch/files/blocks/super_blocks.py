"""Super-blocks of 256: a float16 d (and dmin) for all, and a small integer scale (and minimum) for each sub-block.

    type  sub-block  x                                bytes of a block, in order
    Q2_K  16         d * scale * code - dmin * min    scale and min (4 bits each), 2 bits an element, d, dmin
    Q3_K  16         d * (scale - 32) * (code - 4)    the third bits, 2 bits an element, scales (6 bits), d
    Q4_K  32         d * scale * code - dmin * min    d, dmin, scales and mins (6 bits each), 4 bits an element
    Q5_K  32         d * scale * code - dmin * min    as Q4_K, with the fifth bits before the four bits
    Q6_K  16         d * scale * (code - 32)          4 bits an element, the upper 2 bits, scales (8 bits), d

A byte of codes has elements at a distance of 32 (64 for the four bits of Q6_K), the first in the lowest bits.

Source: ggml src/ggml-common.h (layouts), src/ggml-quants.c (dequantize_row_*_K, get_scale_min_k4) of libggml 0.25.
"""

import numpy as np

from llorch.files.blocks.chunk import Chunk, write_scaled

_LOW_2 = np.uint32(0x0303_0303)  # masks of the low bits of four bytes
_LOW_4 = np.uint32(0x0F0F_0F0F)
_LOW_6 = np.uint32(0x3F3F_3F3F)


def decode_q2_k(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 2-bit codes; 16 of them share a 4-bit scale and a 4-bit minimum."""
    codes = chunk.weave(chunk.bit_fields(chunk.field(16, 64), 2), 32)
    scales, minima = (part.reshape(-1, 16) for part in chunk.bit_fields(chunk.field(0, 16), 4))
    runs = write_scaled(codes, scales * chunk.float16_field(80)[:, None], out)
    runs -= (minima * chunk.float16_field(82)[:, None]).reshape(-1, 1)


def decode_q3_k(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 3-bit codes; 16 of them share a 6-bit scale."""
    codes = chunk.weave(chunk.bit_fields(chunk.field(32, 64), 2), 32).view(np.int8)
    codes |= chunk.weave(chunk.bit_fields(chunk.field(0, 32), 1, place=2), 32).view(np.int8)
    codes -= 4
    scales = _scales_of_q3_k(chunk).astype(np.float32)
    scales -= 32
    scales *= chunk.float16_field(108)[:, None]
    write_scaled(codes, scales, out)


def decode_q4_k(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit codes; 32 of them share a 6-bit scale and a 6-bit minimum."""
    codes = chunk.weave(chunk.bit_fields(chunk.field(16, 128), 4), 32)
    _write_with_minima(chunk, codes, out)


def decode_q5_k(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 5-bit codes; 32 of them share a 6-bit scale and a 6-bit minimum."""
    codes = chunk.weave(chunk.bit_fields(chunk.field(48, 128), 4), 32)
    codes |= chunk.weave(chunk.bit_fields(chunk.field(16, 32), 1, place=4), 32)
    _write_with_minima(chunk, codes, out)


def decode_q6_k(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 6-bit codes; 16 of them share an 8-bit scale."""
    codes = chunk.weave(chunk.bit_fields(chunk.field(0, 128), 4), 64).view(np.int8)
    codes |= chunk.weave(chunk.bit_fields(chunk.field(128, 64), 2, place=4), 32).view(np.int8)
    codes -= 32
    scales = chunk.field(192, 16).view(np.int8).astype(np.float32)
    scales *= chunk.float16_field(208)[:, None]
    write_scaled(codes, scales, out)


def minima_of_q2_k(chunk: Chunk) -> np.ndarray:
    """Return the number added to each sub-block."""
    minima = chunk.bit_fields(chunk.field(0, 16), 4)[1].reshape(-1, 16)
    return -minima.astype(np.float32) * chunk.float16_field(82)[:, None]


def minima_of_q4_k(chunk: Chunk) -> np.ndarray:
    """Return the number added to each sub-block, for Q4_K and Q5_K."""
    return -_scales_and_minima(chunk)[1].astype(np.float32) * chunk.float16_field(2)[:, None]


def _write_with_minima(chunk: Chunk, codes: np.ndarray, out: np.ndarray) -> None:
    """Write code * scale - minimum to `out`, with scale and minimum of each sub-block."""
    scales, minima = _scales_and_minima(chunk)
    runs = write_scaled(codes, scales * chunk.float16_field(0)[:, None], out)
    runs -= (minima * chunk.float16_field(2)[:, None]).reshape(-1, 1)


def _scales_and_minima(chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the 8 + 8 six-bit numbers in the 12 bytes after d and dmin, four at a time.

    Bytes 0-3 and 4-7: the first four scales and minima; their upper two bits belong to the last four. Bytes 8-11: the
    lower four bits of the last four scales, then of the last four minima.
    """
    first, second, third = np.ascontiguousarray(chunk.field(4, 12).view("<u4").T)
    scales = np.stack((first & _LOW_6, third & _LOW_4 | (first >> 6 & _LOW_2) << 4), axis=1)
    minima = np.stack((second & _LOW_6, third >> 4 & _LOW_4 | (second >> 6 & _LOW_2) << 4), axis=1)
    return scales.view(np.uint8), minima.view(np.uint8)


def _scales_of_q3_k(chunk: Chunk) -> np.ndarray:
    """Unpack 16 six-bit scales: lower four bits in 8 bytes, upper two bits in 4 bytes."""
    first, second, upper = np.ascontiguousarray(chunk.field(96, 12).view("<u4").T)
    lower = (first & _LOW_4, second & _LOW_4, first >> 4 & _LOW_4, second >> 4 & _LOW_4)
    scales = [lower_bits | (upper >> 2 * index & _LOW_2) << 4 for index, lower_bits in enumerate(lower)]
    return np.stack(scales, axis=1).view(np.uint8)
