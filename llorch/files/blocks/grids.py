"""Super-blocks of 256 whose elements come in groups of 4 or 8, each an entry of a table (a grid) with signs.

    type     group  x                                          bytes of a block, in order
    IQ2_XXS  8      d * (0.5 + scale) / 4 * entry * sign       d, for each 32: 4 keys, then 4 x 7 signs and the scale
    IQ2_XS   8      d * (0.5 + scale) / 4 * entry * sign       d, keys (9 bits) with 7 signs, scales (4 bits, 16 each)
    IQ2_S    8      d * (0.5 + scale) / 4 * entry * sign       d, keys, signs, upper 2 bits of keys, scales
    IQ3_XXS  4      d * (0.5 + scale) / 2 * entry * sign       d, keys, for each 32: 4 x 7 signs and the scale
    IQ3_S    4      d * (1 + 2 * scale) * entry * sign         d, keys, ninth bits of keys, signs, scales (4 bits)
    IQ1_S    8      d * (1 + 2 * scale) * (entry + delta)      d, keys, for each 32: upper key bits, scale, delta
    IQ1_M    8      d * (1 + 2 * scale) * (entry + delta)      keys, upper key bits with delta, scales with d

Of 8 signs in 7 bits the last makes their number of minuses even. A delta is +0.125 or -0.125.

Source: ggml src/ggml-common.h (layouts) and src/ggml-quants.c (dequantize_row_iq*), as of libggml 0.25. The tables
are those of the gguf package.
"""

from functools import cache

import numpy as np
from gguf import quants

from llorch.files.blocks.chunk import Chunk, write_scaled

_EIGHT_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
_EIGHT_SIGNS = (1 - 2 * _EIGHT_BITS).view(np.uint64)[:, 0]
_EVEN = np.arange(128) | (_EIGHT_BITS[:128].sum(axis=1) & 1) << 7
_SEVEN_SIGNS = _EIGHT_SIGNS[_EVEN]
_NINTH_BITS = _EIGHT_BITS.astype(np.uint16).view("V16")[:, 0]
_SIGN_SHIFTS = np.arange(0, 28, 7, dtype=np.uint32)


@cache
def _grid(name: str) -> np.ndarray:
    """Load a table of the gguf package; the integers of an entry lie in the bytes of one number."""
    package = getattr(quants, name)
    package.init_grid()
    entries = package.grid.reshape(package.grid_shape).astype(np.int8)
    return entries.view(f"<u{entries.shape[1]}")[:, 0]


@cache
def _grid_with_delta() -> np.ndarray:
    """Make the grid of IQ1 plus delta, times 8; the twelfth bit of the key makes delta negative."""
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
    ninth = chunk.look_up(_NINTH_BITS, chunk.field(66, 8).reshape(-1)).view(np.uint16)
    ninth <<= np.uint16(8)
    ninth |= chunk.field(2, 64).reshape(-1)
    signs = chunk.look_up(_EIGHT_SIGNS, chunk.field(74, 32).reshape(-1))
    scales = _odd_scale(chunk.float16_field(0), _nibbles(chunk, 106, 4))
    _write_signed(chunk, _grid("IQ3_S"), ninth, signs, scales, out)


def decode_iq1_s(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 11 bits; each 32 elements share one delta and one scale."""
    words = chunk.field(34, 16).view("<u2").reshape(-1, 1)
    upper = words >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7) | words >> np.uint16(12) & np.uint16(8)
    keys = upper.reshape(-1) << np.uint16(8) | chunk.field(2, 32).reshape(-1)
    scales = _odd_scale(chunk.float16_field(0), (words >> np.uint16(12) & np.uint16(7)).reshape(-1, 8))
    _write_with_delta(chunk, keys, scales, out)


def decode_iq1_m(chunk: Chunk, out: np.ndarray) -> None:
    """Decode groups of 8 with keys of 11 bits; each 8 elements share a delta, each 16 share a scale."""
    upper = _nibbles(chunk, 32, 16).reshape(-1)  # three bits of key, then the delta
    keys = upper.astype(np.uint16) << np.uint16(8) | chunk.field(0, 32).reshape(-1)
    words = chunk.field(48, 8).view("<u2")  # four scales of three bits in each, then four bits of d
    d_bits = (words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(d_bits, axis=1).view("<f2").astype(np.float32)
    scales = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    _write_with_delta(chunk, keys, _odd_scale(d, scales.reshape(-1, 16)), out)


def _write_signed(
    chunk: Chunk, grid: np.ndarray, keys: np.ndarray, signs: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """Write grid[key] * sign * scale to `out`; a sign is -1 or 1, a scale holds for a run of elements."""
    codes = chunk.look_up(grid, keys).view(np.int8)
    codes *= signs.view(np.int8)
    write_scaled(codes, scales, out)


def _write_with_delta(chunk: Chunk, keys: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Write (grid[key] + delta) * scale to `out`; delta is in the key."""
    flat = out.reshape(-1)
    flat[...] = chunk.look_up(_grid_with_delta(), keys).view(np.int8)
    flat *= np.float32(0.125)  # exact; the product with the scale comes after it, as in ggml
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
