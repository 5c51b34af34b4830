"""Bits to numbers, beside a loop over bits and beside the tables of torch."""

import numpy as np
import pytest

from llorch.files.quantised.codes import E2M1, E4M3, E8M0, INT8, across, awq, high_first, stream, ten_per_word


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as 32-bit words of a stream, by Python's integers."""
    n_words = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    return np.frombuffer(b"".join(row.to_bytes(4 * n_words, "little") for row in rows), "<i4").reshape(len(codes), -1)


def drawn(shape: tuple[int, int], bits: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape).astype(np.uint8)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [32, 45, 96])
def test_a_stream_has_its_codes_one_after_another(bits: int, count: int):
    codes = drawn((5, count), bits)
    np.testing.assert_array_equal(stream(packed(codes, bits), bits, count), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [slice(0, 96), slice(7, 41), np.array([95, 0, 33, 33]), np.array([64])])
def test_words_along_the_rows_give_any_rows(bits: int, rows: slice | np.ndarray):
    codes = drawn((96, 6), bits)
    np.testing.assert_array_equal(across(packed(codes.T, bits), bits, rows, 96), codes[rows])


@pytest.mark.parametrize("rows", [slice(3, 29), np.array([31, 2, 17])])
def test_words_of_rows_may_end_in_the_middle(rows: slice | np.ndarray):
    codes = drawn((40, 3), 3)
    np.testing.assert_array_equal(across(packed(codes.T, 3), 3, rows, 40), codes[rows])


@pytest.mark.parametrize("rows", [slice(0, 16), slice(3, 11), np.array([15, 0, 6])])
def test_awq_has_even_rows_before_odd_ones(rows: slice | np.ndarray):
    codes = drawn((16, 4), 4)
    stored = codes.reshape(2, 8, 4)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(16, 4)
    np.testing.assert_array_equal(awq(packed(stored.T, 4), rows, 16), codes[rows])


def test_ten_codes_of_three_bits_may_share_a_word():
    codes = drawn((4, 25), 3)
    words = [[sum(int(code) << 3 * i for i, code in enumerate(row[j : j + 10])) for j in (0, 10, 20)] for row in codes]
    np.testing.assert_array_equal(ten_per_word(np.array(words, np.int32), 25), codes)


def test_the_upper_half_of_a_byte_may_come_first():
    data = np.array([0x12, 0xF0, 0x34], np.uint8)
    np.testing.assert_array_equal(high_first(data, slice(0, 2), 3), [[1, 2, 15], [0, 3, 4]])
    np.testing.assert_array_equal(high_first(data, slice(1, 2), 3), [[0, 3, 4]])
    np.testing.assert_array_equal(high_first(data, np.array([1, 0]), 3), [[0, 3, 4], [1, 2, 15]])


def test_tables_of_small_floats_are_those_of_torch():
    import torch

    data = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3, data.view(torch.float8_e4m3fn).float().numpy())
    np.testing.assert_array_equal(E8M0, data.view(torch.float8_e8m0fnu).float().numpy())
    np.testing.assert_array_equal(INT8, data.view(torch.int8).float().numpy())
    np.testing.assert_array_equal(E2M1[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(E2M1[8:], -E2M1[:8])
