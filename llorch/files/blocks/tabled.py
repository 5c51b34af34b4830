"""Blocks whose four-bit codes stand for the numbers of a table: x = d * table[code].

    type    elements  d                            bytes of a block, in order
    IQ4_NL  32        one float16                  d, 4 bits an element
    IQ4_XS  256       d * (scale - 32), 32 each    d, scales (upper bits in 2 bytes, lower in 4), 4 bits an element
    MXFP4   32        a power of two (E8M0)        d (1 byte), 4 bits an element
    NVFP4   64        an 8-bit float, 16 each      d (4 bytes), 4 bits an element

The numbers of the last two are doubled to be integers, and their d is halved.

Source: ggml src/ggml-common.h (layouts, kvalues_*), src/ggml-quants.c (dequantize_row_*) and src/ggml-impl.h
(ggml_e8m0_to_fp32_half, ggml_ue4m3_to_fp32), as of libggml 0.25.
"""

import numpy as np

from llorch.files.blocks.chunk import Chunk, write_scaled

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _pairs(table: tuple[int, ...]) -> np.ndarray:
    """Map each two codes, as one 16-bit number, to their two values; this halves the number of look-ups."""
    low, high = np.arange(0x1000) & 15, np.arange(0x1000) >> 8
    return np.array(table, np.int8)[np.stack((low, high), axis=1)].view("<i2")[:, 0]


_NONLINEAR_PAIRS = _pairs(_NONLINEAR)
_E2M1_PAIRS = _pairs(_E2M1_DOUBLED)
_E8M0_HALVED = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)  # 255, its NaN, is a number in ggml


def _ue4m3_halved() -> np.ndarray:
    """Make the table of unsigned 8-bit floats, halved; 0 and 127 are zero in ggml, and the sign bit is ignored."""
    exponent, mantissa = np.arange(256) >> 3 & 15, np.arange(256) & 7
    halved = np.where(exponent == 0, np.ldexp(mantissa / 1.0, -10), np.ldexp(1 + mantissa / 8, exponent - 8))
    halved[0x7F] = 0
    return halved.astype(np.float32)


_UE4M3_HALVED = _ue4m3_halved()


def decode_iq4_nl(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit codes of a non-linear table, with one float16 scale per block of 32."""
    write_scaled(_look_up(chunk, _NONLINEAR_PAIRS, chunk.field(2, 16), 16), chunk.float16_field(0), out)


def decode_iq4_xs(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit codes of a non-linear table, with a float16 and eight 6-bit scales per block of 256."""
    lower = np.stack(chunk.bit_fields(chunk.field(4, 4), 4), axis=1).reshape(-1, 8)
    upper = chunk.blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = (lower | upper << np.uint16(4)).astype(np.float32)
    scales -= 32
    scales *= chunk.float16_field(0)[:, None]
    write_scaled(_look_up(chunk, _NONLINEAR_PAIRS, chunk.field(8, 128), 16), scales, out)


def decode_mxfp4(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit floats, with a power of two as the scale of each block of 32."""
    write_scaled(_look_up(chunk, _E2M1_PAIRS, chunk.field(1, 16), 16), _E8M0_HALVED[chunk.blocks[:, 0]], out)


def decode_nvfp4(chunk: Chunk, out: np.ndarray) -> None:
    """Decode 4-bit floats, with four 8-bit floats as scales of each block of 64."""
    write_scaled(_look_up(chunk, _E2M1_PAIRS, chunk.field(4, 32), 8), _UE4M3_HALVED[chunk.field(0, 4)], out)


def _look_up(chunk: Chunk, pairs: np.ndarray, data: np.ndarray, width: int) -> np.ndarray:
    """Return the table's values of four-bit codes: for each `width` bytes the low nibbles, then the high ones."""
    codes = chunk.weave(chunk.bit_fields(data, 4), width)
    return chunk.look_up(pairs, codes.view("<u2")).view(np.int8)
