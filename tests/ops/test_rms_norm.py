"""RMSNorm: a row by hand, then what must hold for every row."""

import jaxtyping
import numpy as np
import pytest

from llorch.ops.rms_norm import rms_norm

pytestmark = pytest.mark.usefixtures("arithmetic")


def test_rms_norm_matches_a_row_worked_by_hand():
    x = np.array([[3.0, 4.0]], np.float32)  # mean 3.5, which is not subtracted; mean square 12.5
    weight = np.array([2.0, 10.0], np.float32)  # not ones: ones would hide the gain
    actual = rms_norm(x, weight, eps=0.5)  # divides by sqrt(13)
    expected = np.array([[6.0, 40.0]], np.float32) / np.float32(13**0.5)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, strict=True, equal_nan=False)


def test_rms_norm_ignores_the_scale_of_a_row_as_eps_vanishes(rng):
    x, weight = rng.normal(size=(5, 7)), rng.normal(size=7)
    np.testing.assert_allclose(rms_norm(x * 1000, weight, eps=1e-300), rms_norm(x, weight, eps=1e-300), rtol=1e-13)


def test_rms_norm_keeps_small_rows_small_through_eps():
    x = np.full((1, 4), 1e-3)  # mean square 1e-6, far below eps
    np.testing.assert_allclose(rms_norm(x, np.ones(4), eps=1e-2), x / np.sqrt(1.0001e-2), rtol=1e-5)


def test_rms_norm_of_zeros_is_zeros(dtype):
    actual = rms_norm(np.zeros((2, 3), dtype), np.full(3, 2.0, dtype), eps=1e-6)
    np.testing.assert_array_equal(actual, np.zeros((2, 3), dtype), strict=True)


def test_rms_norm_treats_every_head_of_every_token_as_a_row(rng):
    x, weight = rng.normal(size=(5, 3, 8)), rng.normal(size=8)
    actual = rms_norm(x, weight, eps=1e-5)
    for token in range(5):
        for head in range(3):
            np.testing.assert_array_equal(actual[token, head], rms_norm(x[token, head][None], weight, eps=1e-5)[0])


def test_rms_norm_of_small_float32_arrays_is_the_float64_result_rounded_once(rng, arithmetic):
    x, weight = rng.normal(size=(6, 9)).astype(np.float32), rng.normal(size=9).astype(np.float32)
    reference = rms_norm(x.astype(np.float64), weight.astype(np.float64), eps=1e-5)
    actual = rms_norm(x, weight, eps=1e-5)
    np.testing.assert_allclose(actual, reference, rtol=3e-7)
    if arithmetic == "widened":
        np.testing.assert_array_equal(actual, reference.astype(np.float32), strict=True)


def test_rms_norm_survives_float32_values_whose_squares_overflow(rng):
    x = rng.normal(size=(2, 5)).astype(np.float32)
    weight = rng.normal(size=5).astype(np.float32)
    actual = rms_norm(x * np.float32(1e30), weight, eps=1e-5)
    np.testing.assert_allclose(actual, rms_norm(x, weight, eps=1e-30), rtol=1e-5, strict=True, equal_nan=False)


def test_rms_norm_with_a_gain_of_another_width_is_refused_under_test(rng):
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        rms_norm(rng.normal(size=(4, 6)), rng.normal(size=1), eps=1e-5)  # NumPy alone would broadcast it
