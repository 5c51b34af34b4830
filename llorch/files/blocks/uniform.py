"""Floats, and blocks of uniform codes: x = code * d, or x = code * d + m, with one float d (and m) per block.

    type   elements  bytes of a block, in order
    Q1_0   128       d float16, 1 bit an element: +d or -d
    Q2_0   64        d float16, 2 bits an element, code - 1
    Q4_0   32        d float16, 4 bits an element, code - 8
    Q4_1   32        d, m float16, 4 bits an element
    Q5_0   32        d float16, the fifth bits (4 bytes), 4 bits an element, code - 16
    Q5_1   32        d, m float16, the fifth bits (4 bytes), 4 bits an element
    Q8_0   32        d float16, 8 bits an element, signed
    Q8_1   32        d float16, a sum that decoding does not need, 8 bits an element, signed
    Q8_K   256       d float32, 8 bits an element, signed, 16 sums
    TQ2_0  256       2 bits an element, code - 1, d float16

Four-bit codes: the first half of a block is in the low nibbles of its bytes, the second half in the high nibbles.

Source: ggml src/ggml-common.h (layouts) and src/ggml-quants.c (dequantize_row_*), as of libggml 0.25.
"""

import numpy as np

from llorch.files.blocks.chunk import Chunk, write_scaled

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
_SIGNS = (2 * _BITS - 1).view(np.uint64)[:, 0]  # the eight codes of a byte
_FIFTH_BITS = (16 * _BITS).view(np.uint64)[:, 0]
_PAIRS_OF_BITS = (np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3).astype(np.int8)
_QUADS = (_PAIRS_OF_BITS - np.int8(1)).view(np.uint32)[:, 0]


def decode_f32(chunk: Chunk, out: np.ndarray) -> None:
    """Copy float32 numbers."""
    out[...] = chunk.blocks.view("<f4")


def decode_f64(chunk: Chunk, out: np.ndarray) -> None:
    """Round float64 numbers to float32."""
    out[...] = chunk.blocks.view("<f8")


def decode_bf16(chunk: Chunk, out: np.ndarray) -> None:
    """Widen bfloat16 numbers, see `widen_bfloat16`."""
    widen_bfloat16(chunk.blocks.view("<u2"), out)


def widen_bfloat16(codes: np.ndarray, out: np.ndarray) -> None:
    """Widen bfloat16, the upper half of a float32."""
    bits = out.view(np.uint32)
    bits[...] = codes
    bits <<= np.uint32(16)


def decode_f16(chunk: Chunk, out: np.ndarray) -> None:
    """Widen float16, four times as fast as NumPy's cast.

    Exponent and mantissa are shifted to their bits in a float32, which is then 2^112 too small, because the exponents
    have different biases. The product is exact, also for subnormal numbers. Infinity and NaN become 2^16 or more; then
    NumPy's cast is used.
    """
    bits = out.view(np.int32)
    bits[...] = chunk.blocks.view("<i2")  # the sign fills the upper half
    bits <<= np.int32(13)
    bits &= np.int32(-0x7000_0001)  # keep one copy of the sign
    np.multiply(out, np.float32(2**112), out=out)
    if out.size and not (out.max() < 2**16 and out.min() > -(2**16)):
        out[...] = chunk.blocks.view("<f2")


def decode_q1_0(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 1-bit codes, which are signs."""
    signs = chunk.look_up(_SIGNS, chunk.field(2, 16).reshape(-1)).view(np.int8)
    write_scaled(signs, chunk.float16_field(0), out)


def decode_q2_0(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 2-bit codes; a byte has four neighbouring elements."""
    codes = chunk.look_up(_QUADS, chunk.field(2, 16).reshape(-1)).view(np.int8)
    write_scaled(codes, chunk.float16_field(0), out)


def decode_tq2_0(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 2-bit codes; a byte has four elements at a distance of 32."""
    codes = chunk.weave(chunk.bit_fields(chunk.field(0, 64), 2), 32).view(np.int8)
    codes -= 1
    write_scaled(codes, chunk.float16_field(64), out)


def decode_q4_0(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit codes with a scale."""
    codes = _four_bits(chunk, 2)
    codes -= 8
    write_scaled(codes, chunk.float16_field(0), out)


def minima_of_block(chunk: Chunk) -> np.ndarray:
    """Return the number added to each block, for Q4_1 and Q5_1."""
    return chunk.float16_field(2)[:, None]


def decode_q4_1(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit codes with a scale and a minimum."""
    runs = write_scaled(_four_bits(chunk, 4), chunk.float16_field(0), out)
    runs += minima_of_block(chunk)


def decode_q5_0(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 5-bit codes with a scale."""
    codes = _five_bits(chunk, 2)
    codes -= 16
    write_scaled(codes, chunk.float16_field(0), out)


def decode_q5_1(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 5-bit codes with a scale and a minimum."""
    runs = write_scaled(_five_bits(chunk, 4), chunk.float16_field(0), out)
    runs += chunk.float16_field(2)[:, None]


def decode_q8_0(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 8-bit codes with a scale."""
    out[...] = chunk.blocks[:, 2:].view(np.int8)
    out *= chunk.float16_field(0)[:, None]


def decode_q8_1(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 8-bit codes with a scale; the stored sum of the block is not needed."""
    out[...] = chunk.blocks[:, 4:].view(np.int8)
    out *= chunk.float16_field(0)[:, None]


def decode_q8_k(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 8-bit codes with a float32 scale; the stored sums are not needed."""
    out[...] = chunk.blocks[:, 4:260].view(np.int8)
    out *= chunk.blocks[:, :4].view("<f4")


def _four_bits(chunk: Chunk, start: int) -> np.ndarray:
    """Return the unsigned four-bit codes of each block, as int8, in the order of the elements."""
    return chunk.weave(chunk.bit_fields(chunk.field(start, 16), 4), 16).view(np.int8)


def _five_bits(chunk: Chunk, start: int) -> np.ndarray:
    """Return the unsigned five-bit codes of each block, as int8; their fifth bits come first in the block."""
    codes = _four_bits(chunk, start + 4)
    codes |= chunk.look_up(_FIFTH_BITS, chunk.field(start, 4).reshape(-1)).view(np.int8)
    return codes
