"""Block types with lookup tables: x = d * table[code], or a grid entry for a group of 4 or 8 elements, with signs.

    type     elements  d                            bytes of a block, in order
    IQ4_NL   32        one float16                  d, 4 bits an element
    IQ4_XS   256       d * (scale - 32), 32 each    d, scales (upper bits in 2 bytes, lower in 4), 4 bits an element
    MXFP4    32        a power of two (E8M0)        d (1 byte), 4 bits an element
    NVFP4    64        an 8-bit float, 16 each      d (4 bytes), 4 bits an element

Table values of MXFP4 and NVFP4 are doubled to be integers, and d is halved. A key is the index of a grid entry. All
grid types are super-blocks of 256:

    type     group  x                                          bytes of a block, in order
    IQ2_XXS  8      d * (0.5 + scale) / 4 * entry * sign       d, for each 32: 4 keys, then 4 x 7 signs and the scale
    IQ2_XS   8      d * (0.5 + scale) / 4 * entry * sign       d, keys (9 bits) with 7 signs, scales (4 bits, 16 each)
    IQ2_S    8      d * (0.5 + scale) / 4 * entry * sign       d, keys, signs, upper 2 bits of keys, scales
    IQ3_XXS  4      d * (0.5 + scale) / 2 * entry * sign       d, keys, for each 32: 4 x 7 signs and the scale
    IQ3_S    4      d * (1 + 2 * scale) * entry * sign         d, keys, ninth bits of keys, signs, scales (4 bits)
    IQ1_S    8      d * (1 + 2 * scale) * (entry + delta)      d, keys, for each 32: upper key bits, scale, delta
    IQ1_M    8      d * (1 + 2 * scale) * (entry + delta)      keys, upper key bits with delta, scales with d

If 8 signs are stored in 7 bits, the last sign makes the number of minus signs even. A delta is +0.125 or -0.125.

Source: ggml src/ggml-common.h (layouts, kvalues_*), src/ggml-quants.c (dequantize_row_*) and src/ggml-impl.h
(ggml_e8m0_to_fp32_half, ggml_ue4m3_to_fp32), as of libggml 0.25. The grids come from the gguf package.
"""

from functools import cache

import numpy as np
from gguf import quants

from llorch.files.blocks.chunk import Chunk, write_scaled

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4 values by code
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # by code


def _pairs(table: tuple[int, ...]) -> np.ndarray:
    """Return a table from two codes, as one 16-bit number, to two values; this halves the number of look-ups."""
    low, high = np.arange(0x1000) & 15, np.arange(0x1000) >> 8
    return np.array(table, np.int8)[np.stack((low, high), axis=1)].view("<i2")[:, 0]


_NONLINEAR_PAIRS = _pairs(_NONLINEAR)
_E2M1_PAIRS = _pairs(_E2M1_DOUBLED)
_E8M0_HALVED = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)  # in ggml 255 (NaN) is a number


def _ue4m3_halved() -> np.ndarray:
    """Build the table of unsigned 8-bit floats, halved; in ggml 0 and 127 are zero, and the sign bit is ignored."""
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


_EIGHT_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
_EIGHT_SIGNS = (1 - 2 * _EIGHT_BITS).view(np.uint64)[:, 0]  # eight signs of a byte, as int8
_EVEN = np.arange(128) | (_EIGHT_BITS[:128].sum(axis=1) & 1) << 7  # seven bits, and an eighth that makes them even
_SEVEN_SIGNS = _EIGHT_SIGNS[_EVEN]  # eight signs, stored in seven bits
_NINTH_BITS = _EIGHT_BITS.astype(np.uint16).view("V16")[:, 0]  # eight bits of a byte, as uint16
_SIGN_SHIFTS = np.arange(0, 28, 7, dtype=np.uint32)


@cache
def _grid(name: str) -> np.ndarray:
    """Load a grid of the gguf package; each entry is one number, its bytes are the integers."""
    grid_class = getattr(quants, name)
    grid_class.init_grid()
    entries = grid_class.grid.reshape(grid_class.grid_shape).astype(np.int8)
    return entries.view(f"<u{entries.shape[1]}")[:, 0]


@cache
def _grid_with_delta() -> np.ndarray:
    """Build the grid of IQ1 plus delta, times 8; the twelfth bit of the key makes delta negative."""
    entries = 8 * _grid("IQ1_S").view(np.int8)
    return np.concatenate((entries + np.int8(1), entries - np.int8(1))).view(np.uint64)


def decode_iq2_xxs(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 8 bits."""
    pairs = chunk.field(2, 64).view("<u4").reshape(-1, 2)
    keys = np.ascontiguousarray(pairs[:, 0]).view(np.uint8)
    signs, scales = _signs_and_scales(chunk, pairs[:, 1])
    _write_signed(chunk, _grid("IQ2_XXS"), keys, signs, _scale(chunk, scales.reshape(-1, 8)), out)


def decode_iq2_xs(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 9 bits."""
    words = chunk.field(2, 64).view("<u2").reshape(-1)
    signs = chunk.look_up(_SEVEN_SIGNS, words >> np.uint16(9))
    scales = _scale(chunk, _nibbles(chunk, 66, 8))
    _write_signed(chunk, _grid("IQ2_XS"), words & np.uint16(511), signs, scales, out)


def decode_iq2_s(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 10 bits."""
    upper = np.stack(chunk.bit_fields(chunk.field(66, 8), 2), axis=1).reshape(-1)
    keys = chunk.field(2, 32).reshape(-1) | upper.astype(np.uint16) << np.uint16(8)
    signs = chunk.look_up(_EIGHT_SIGNS, chunk.field(34, 32).reshape(-1))
    scales = _scale(chunk, _nibbles(chunk, 74, 8))
    _write_signed(chunk, _grid("IQ2_S"), keys, signs, scales, out)


def decode_iq3_xxs(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 4 with keys of 8 bits."""
    signs, scales = _signs_and_scales(chunk, chunk.field(66, 32).view("<u4").reshape(-1))
    scales = _scale(chunk, scales.reshape(-1, 8), unit=0.5)
    _write_signed(chunk, _grid("IQ3_XXS"), chunk.field(2, 64).reshape(-1), signs, scales, out)


def decode_iq3_s(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 4 with keys of 9 bits."""
    keys = chunk.look_up(_NINTH_BITS, chunk.field(66, 8).reshape(-1)).view(np.uint16)
    keys <<= np.uint16(8)
    keys |= chunk.field(2, 64).reshape(-1)
    signs = chunk.look_up(_EIGHT_SIGNS, chunk.field(74, 32).reshape(-1))
    scales = _odd_scale(chunk.float16_field(0), _nibbles(chunk, 106, 4))
    _write_signed(chunk, _grid("IQ3_S"), keys, signs, scales, out)


def decode_iq1_s(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 11 bits; each 32 elements share one delta and one scale."""
    words = chunk.field(34, 16).view("<u2").reshape(-1, 1)
    upper = words >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7) | words >> np.uint16(12) & np.uint16(8)
    keys = upper.reshape(-1) << np.uint16(8) | chunk.field(2, 32).reshape(-1)
    scales = _odd_scale(chunk.float16_field(0), (words >> np.uint16(12) & np.uint16(7)).reshape(-1, 8))
    _write_with_delta(chunk, keys, scales, out)


def decode_iq1_m(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 11 bits; each 8 elements share a delta, each 16 share a scale."""
    upper = _nibbles(chunk, 32, 16).reshape(-1)  # three key bits, then the delta bit
    keys = upper.astype(np.uint16) << np.uint16(8) | chunk.field(0, 32).reshape(-1)
    words = chunk.field(48, 8).view("<u2")  # four scales of three bits in each, then four bits of d
    d_bits = (words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(d_bits, axis=1).view("<f2").astype(np.float32)
    scales = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    _write_with_delta(chunk, keys, _odd_scale(d, scales.reshape(-1, 16)), out)


def _write_signed(
    chunk: Chunk, grid: np.ndarray, keys: np.ndarray, signs: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """Write grid[key] * sign * scale to `out`; a sign is -1 or 1, a scale applies to a run of elements."""
    codes = chunk.look_up(grid, keys).view(np.int8)
    codes *= signs.view(np.int8)
    write_scaled(codes, scales, out)


def _write_with_delta(chunk: Chunk, keys: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Write (grid[key] + delta) * scale to `out`; the key contains the sign of delta."""
    flat = out.reshape(-1)
    flat[...] = chunk.look_up(_grid_with_delta(), keys).view(np.int8)
    flat *= np.float32(0.125)  # exact; multiplied before the scale, as in ggml
    runs = out.reshape(scales.size, -1)
    runs *= scales.reshape(-1, 1)


def _nibbles(chunk: Chunk, start: int, size: int) -> np.ndarray:
    """Unpack numbers of four bits, two to a byte."""
    return np.stack(chunk.bit_fields(chunk.field(start, size), 4), axis=1).reshape(-1, 2 * size)


def _signs_and_scales(chunk: Chunk, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack four times seven signs from the lower bits of each word, and a scale from the upper four."""
    keys = words[:, None] >> _SIGN_SHIFTS & np.uint32(127)
    return chunk.look_up(_SEVEN_SIGNS, keys.reshape(-1)), words >> np.uint32(28)


def _scale(chunk: Chunk, scales: np.ndarray, *, unit: float = 0.25) -> np.ndarray:
    """Return the scales of groups, d * (scale + 0.5) * unit, (blocks, groups)."""
    shifted = scales.astype(np.float32) + np.float32(0.5)
    return chunk.float16_field(0)[:, None] * shifted * np.float32(unit)


def _odd_scale(d: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the scales of groups, d * (2 * scale + 1), (blocks, groups)."""
    return d[:, None] * (2 * scales.astype(np.float32) + 1)
