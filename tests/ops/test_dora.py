"""DoRA: lengths by hand, finite differences with the length held constant, and what it means for the whole matrix."""

import numpy as np
import pytest
from helpers.finite_differences import assert_is_gradient

from llorch.ops.dora import dora, dora_backward, row_lengths

pytestmark = pytest.mark.usefixtures("arithmetic")


@pytest.fixture
def arrays(rng):
    """W x, delta, magnitude and lengths."""
    return *rng.normal(size=(2, 5, 4)), rng.normal(size=4), rng.random(4) + 0.5


def test_lengths_are_those_of_the_rows_of_the_sum():
    lengths = row_lengths(np.array([[1.0, 2.0], [3.0, 0.0]]), np.array([[2.0, 2.0], [2.0, 12.0]]))
    np.testing.assert_array_equal(lengths, [5, 13])


def test_lengths_of_long_rows_are_rounded_once(rng):
    weight = rng.normal(size=(3, 5000)).astype(np.float32)
    expected = np.sqrt(np.square(weight, dtype=np.float64).sum(axis=1)).astype(np.float32)
    np.testing.assert_array_equal(row_lengths(weight, np.zeros_like(weight)), expected, strict=True)


def test_with_the_learned_length_equal_to_the_length_only_the_delta_is_added(arrays):
    of_base, delta, _, lengths = arrays
    np.testing.assert_array_equal(dora(of_base, delta, lengths, lengths), delta)


def test_the_sum_is_the_product_with_rows_of_the_learned_length(rng):
    x, weight, addition = rng.normal(size=(5, 3)), rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    magnitude, lengths = rng.random(4) + 0.5, row_lengths(weight, addition)
    directed = (weight + addition) / lengths[:, None] * magnitude[:, None]
    np.testing.assert_allclose(np.linalg.norm(directed, axis=1), magnitude, rtol=1e-15)
    of_base = x @ weight.T
    actual = of_base + dora(of_base, x @ addition.T, magnitude, lengths)
    np.testing.assert_allclose(actual, x @ directed.T, rtol=0, atol=1e-14)


def test_the_backward_is_the_gradient_with_the_length_held_constant(arrays, rng):
    of_base, delta, magnitude, lengths = arrays
    grad = rng.normal(size=(5, 4))
    d_base, d_delta, d_magnitude = dora_backward(grad, of_base, delta, magnitude, lengths)

    def weighed(of_base, delta, magnitude):
        return float((dora(of_base, delta, magnitude, lengths) * grad).sum())

    assert_is_gradient(d_base, lambda v: weighed(v, delta, magnitude), of_base, "of_base")
    assert_is_gradient(d_delta, lambda v: weighed(of_base, v, magnitude), delta, "delta")
    assert_is_gradient(d_magnitude, lambda v: weighed(of_base, delta, v), magnitude, "magnitude")


def test_dtypes_are_kept(arrays, dtype):
    of_base, delta, magnitude, lengths = (array.astype(dtype) for array in arrays)
    results = [dora(of_base, delta, magnitude, lengths), row_lengths(of_base, delta)]
    results += dora_backward(delta, of_base, delta, magnitude, lengths)
    assert {array.dtype for array in results} == {np.dtype(dtype)}
