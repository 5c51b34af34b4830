"""Bits to numbers: packed integers, and tables of 4-bit and 8-bit floats.

A code stream is a sequence of codes from the least significant bit, also across word boundaries.

Source: OCP Microscaling Formats (MX) v1.0 (E2M1, E4M3, E8M0); compressed-tensors `pack_to_int32`; gptqmodel and AutoAWQ
(order of the codes in a word).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int, UInt8

from llorch.files.packed import Rows

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in the word of each of 8 rows of the matrix (out, in)


def stream(words: np.ndarray, bits: int, count: int) -> UInt8[np.ndarray, "rows codes"]:
    """Unpack the first `count` codes of every row of a code stream; `words` are contiguous integers of any width."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        pairs = data.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return pairs.view(np.uint8)[:, :count]
    if bits == 2:
        codes = np.empty((len(data), data.shape[1], 4), np.uint8)
        for index in range(4):
            np.right_shift(data, index * bits, out=codes[:, :, index])
        codes &= 3
        return codes.reshape(len(data), -1)[:, :count]
    binary = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits].reshape(len(data), count, bits)
    return np.packbits(binary, axis=2, bitorder="little")[:, :, 0]


def ten_per_word(words: np.ndarray, count: int) -> UInt8[np.ndarray, "rows codes"]:
    """Return 3-bit codes, ten per 32-bit word, the format of compressed-tensors before 2026."""
    shifts = np.arange(10, dtype=np.uint32) * 3
    codes = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & 7
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


def codes_across(
    words: np.ndarray, bits: int, rows: Rows, n_rows: int, order: Sequence[int] | None = None
) -> UInt8[np.ndarray, "rows other"]:
    """Return the codes of some of `n_rows` rows of a matrix whose words have the codes of neighbouring rows.

    `words` are (other, rows * bits / 32), 32 bits each. `order` has the positions of 8 rows in a word of 8 codes of 4
    bits; None: a stream, in order.
    """
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(n_rows)
        first, last = start // 32, -(-stop // 32)  # 32 codes fill whole words, for any number of bits
        codes = stream(words[:, first * bits : last * bits], bits, min(n_rows, last * 32) - first * 32)
        positions = np.arange(start, stop) - first * 32
    else:
        blocks, block_index = np.unique(rows // 32, return_inverse=True)
        columns = (blocks[:, None] * bits + np.arange(bits)).reshape(-1)
        columns = columns[columns < words.shape[1]]
        codes = stream(words[:, columns], bits, columns.size * 32 // bits)
        positions = block_index * 32 + rows % 32
    if order is not None:
        positions = positions // 8 * 8 + np.asarray(order)[positions % 8]
    return np.ascontiguousarray(codes[:, positions].T)


def awq(words: np.ndarray, rows: Rows, n_rows: int) -> UInt8[np.ndarray, "rows other"]:
    """Return 4-bit codes in the order of AWQ, 8 rows per word."""
    return codes_across(words, 4, rows, n_rows, AWQ_ORDER)


def high_first(data: UInt8[np.ndarray, " bytes"], rows: Rows, n_in: int) -> UInt8[np.ndarray, "rows in"]:
    """Return 4-bit codes, two per byte, high nibble first, row after row."""
    if not isinstance(rows, slice):
        positions = rows[:, None] * n_in + np.arange(n_in)
        return data[positions // 2] >> np.where(positions % 2, 0, 4).astype(np.uint8) & 15
    first, last = rows.start * n_in, rows.stop * n_in
    pairs = data[first // 2 : -(-last // 2)]
    codes = np.empty((pairs.size, 2), np.uint8)
    np.right_shift(pairs, 4, out=codes[:, 0])
    np.bitwise_and(pairs, 15, out=codes[:, 1])
    return codes.reshape(-1)[first % 2 : first % 2 + last - first].reshape(-1, n_in)


def integers(bits: int, *, offset: int = 0) -> Float32[np.ndarray, " codes"]:
    """Return the values of unsigned codes minus an offset."""
    return np.arange(1 << bits, dtype=np.float32) - np.float32(offset)


def _minifloat(code: Int[np.ndarray, " codes"], exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Decode small floats to float64; the caller handles special values."""
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    is_normal = exponent > 0
    magnitude = np.ldexp((is_normal << mantissa_bits) + mantissa, np.maximum(exponent, 1) - bias - mantissa_bits)
    return np.where(code >> (exponent_bits + mantissa_bits) & 1, -magnitude, magnitude)


def _e4m3() -> np.ndarray:
    """Return the values of all 256 codes of E4M3, two of which are NaN."""
    values = _minifloat(np.arange(256), 4, 3).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


E4M3: Float32[np.ndarray, "256"] = _e4m3()
E2M1: Float32[np.ndarray, "16"] = _minifloat(np.arange(16), 2, 1).astype(np.float32)
E8M0: Float32[np.ndarray, "256"] = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
INT8: Float32[np.ndarray, "256"] = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
for _table in (E4M3, E2M1, E8M0, INT8):
    _table.flags.writeable = False
