"""8-bit moments in NumPy: bitsandbytes' values, the nearest code, bounds on the error, zeros that stay zero."""

import numpy as np
import pytest
from bitsandbytes_codes import kernel_book, kernel_codes

from llorch.train.adamw import adamw_step
from llorch.train.eight_bit import BLOCK, SIGNED, UNSIGNED, CodeBook, adamw_8bit_step, dequantise, quantise, zeros

BOOKS = pytest.mark.parametrize("book", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def numbers(book: CodeBook, rng: np.random.Generator, n: int = 5 * BLOCK + 37) -> np.ndarray:
    """Over eight decades, of the signs that the book has."""
    x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-8, 0, n)).astype(np.float32)
    return x if book is SIGNED else abs(x)


@BOOKS
def test_a_book_has_256_different_values_from_its_lowest_to_one(book: CodeBook):
    assert book.values.shape == (256,)
    assert (np.diff(book.values) > 0).all()
    assert 0 in book.values
    assert book.values[-1] == 1
    np.testing.assert_allclose(book.values[0], -0.99296875 if book is SIGNED else 0, rtol=1e-6)


def test_the_smallest_decade_worked_by_hand():
    positive = SIGNED.values[SIGNED.values > 0]
    np.testing.assert_allclose(positive[:3], [0.55e-6, 3.25e-6, 7.75e-6], rtol=1e-6)
    np.testing.assert_allclose(UNSIGNED.values[1:3], [3.25e-7, 7.75e-7], rtol=1e-6)


@BOOKS
def test_every_number_gets_the_nearest_value(book: CodeBook, rng: np.random.Generator):
    x = numbers(book, rng)
    got = quantise(x, book)
    scaled = x.astype(np.float64) / np.repeat(got.absmax, BLOCK)[: len(x)]
    nearest = abs(scaled[:, None] - book.values).min(-1)
    error = abs(scaled - book.values[got.codes])
    np.testing.assert_allclose(error, nearest, rtol=0, atol=2**-23)  # at a tie, by a rounded division


@BOOKS
def test_the_error_is_small_beside_the_number_and_the_block(book: CodeBook, rng: np.random.Generator):
    x = numbers(book, rng)
    got = dequantise(quantise(x, book), book)
    largest = np.repeat(quantise(x, book).absmax, BLOCK)[: len(x)]
    assert (abs(got - x) <= 0.5 * abs(x) + 1e-6 * largest).all()
    assert (abs(got - x) <= 0.0072 * largest).all()


@BOOKS
def test_values_of_the_book_come_back_as_they_are(book: CodeBook):
    np.testing.assert_array_equal(quantise(book.values, book).codes, np.arange(256))
    np.testing.assert_array_equal(dequantise(quantise(book.values, book), book), book.values)


@BOOKS
def test_zeros_stay_zero_alone_and_in_company(book: CodeBook):
    alone = quantise(np.zeros((3, 100), np.float32), book)
    assert not alone.codes.any()
    assert not dequantise(alone, book).any()
    assert not dequantise(zeros((3, 100)), book).any()
    x = np.zeros(BLOCK, np.float32)
    x[7] = 0.3
    np.testing.assert_array_equal(dequantise(quantise(x, book), book), x)


def test_blocks_have_scales_of_their_own(rng: np.random.Generator):
    x = rng.standard_normal((4, BLOCK)).astype(np.float32)
    got, scaled = quantise(x, SIGNED), quantise(x * np.array([[1], [2**-40], [8], [2**60]], np.float32), SIGNED)
    np.testing.assert_array_equal(got.codes, scaled.codes)
    np.testing.assert_array_equal(got.absmax, abs(x).max(-1))


def test_numbers_too_small_for_a_reciprocal_are_zeros():
    got = quantise(np.array([1e-42, 0, 3e-43, 1e-44], np.float32), UNSIGNED)
    assert not got.absmax.any()
    assert not dequantise(got, UNSIGNED).any()


def test_a_step_uses_the_moments_before_they_are_rounded(rng: np.random.Generator):
    param, grad = rng.standard_normal((2, 40, 150)).astype(np.float32)
    nothing = np.zeros_like(param)
    want, m, v = adamw_step(param, grad, nothing, nothing, step=1, **HYPER)
    got, m8, v8 = adamw_8bit_step(param, grad, zeros(param.shape), zeros(param.shape), step=1, **HYPER)
    np.testing.assert_array_equal(got, want)
    assert m8.codes.shape == param.shape
    for codes, exact, book in ((m8, m, SIGNED), (v8, v, UNSIGNED)):
        np.testing.assert_array_equal(codes.codes, quantise(exact, book).codes)
    later, _, _ = adamw_8bit_step(got, grad, m8, v8, step=2, **HYPER)
    exact, _, _ = adamw_step(want, grad, m, v, step=2, **HYPER)
    assert 0 < abs(later - exact).max() < 0.5 * HYPER["lr"]


@pytest.mark.live
@BOOKS
def test_values_are_those_of_bitsandbytes_to_the_last_bits(book: CodeBook):
    functional = pytest.importorskip("bitsandbytes.functional", reason="NOT RUN: bitsandbytes is not installed")
    want = functional.create_dynamic_map(signed=book is SIGNED).numpy()
    np.testing.assert_allclose(book.values, want, rtol=2.5e-7, atol=0)  # 2 ulp: its grid is float32


@pytest.mark.live
@BOOKS
def test_codes_and_scales_are_those_of_the_kernel_given_its_thresholds(book: CodeBook, rng: np.random.Generator):
    theirs, x = kernel_book(signed=book is SIGNED), numbers(book, rng, 1000 * BLOCK + 37)
    np.testing.assert_array_equal(quantise(x, theirs).codes, kernel_codes(x, theirs.values))


@pytest.mark.live
@BOOKS
def test_our_thresholds_are_those_of_the_kernel_to_one_step_of_its_table(book: CodeBook):
    theirs = kernel_book(signed=book is SIGNED)
    reached = theirs.thresholds > -1
    assert (abs(theirs.thresholds - book.thresholds)[reached] <= 2 / 65535).all()
