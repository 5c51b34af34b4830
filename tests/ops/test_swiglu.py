"""SwiGLU and sigmoid: values by hand, then their limits."""

import numpy as np
import pytest

from llorch.ops.sigmoid import sigmoid
from llorch.ops.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("arithmetic")


def test_swiglu_matches_values_worked_by_hand():
    gate = np.array([[np.log(3.0), -np.log(3.0), 2.0]])  # sigmoid 3/4, 1/4, 1 / (1 + e^-2)
    up = np.array([[8.0, 8.0, -1.5]])
    expected = [[6 * np.log(3.0), -2 * np.log(3.0), -3 / (1 + np.exp(-2.0))]]
    np.testing.assert_allclose(swiglu(gate, up), expected, rtol=1e-15)


def test_swiglu_of_zero_gate_is_zero(rng):
    np.testing.assert_array_equal(swiglu(np.zeros((2, 3)), rng.normal(size=(2, 3))), np.zeros((2, 3)))


def test_swiglu_is_linear_in_up_but_not_in_gate(rng):
    gate, up = rng.normal(size=(4, 5)), rng.normal(size=(4, 5))
    np.testing.assert_array_equal(swiglu(gate, 2 * up), 2 * swiglu(gate, up))
    assert not np.allclose(swiglu(2 * gate, up), 2 * swiglu(gate, up), rtol=1e-3)


def test_swiglu_passes_up_times_gate_when_the_gate_is_wide_open(dtype):
    gate, up = np.array([[100.0, 1e4]], dtype), np.array([[3.0, -2.0]], dtype)
    np.testing.assert_array_equal(swiglu(gate, up), gate * up, strict=True)


def test_swiglu_of_very_negative_gates_is_zero_without_a_warning(dtype):
    gate, up = np.array([[-100.0, -800.0, -1e30]], dtype), np.array([[3.0, -2.0, 5.0]], dtype)
    actual = swiglu(gate, up)  # a warning is an error in this suite
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, 0, atol=1e-40)


def test_sigmoid_matches_values_worked_by_hand():
    x = np.array([[0.0, np.log(3.0)], [-np.log(3.0), -np.log(9.0)]])
    np.testing.assert_allclose(sigmoid(x), [[0.5, 0.75], [0.25, 0.1]], rtol=1e-15)


def test_far_from_zero_sigmoid_is_0_or_1_without_a_warning(dtype):
    actual = sigmoid(np.array([-1e4, -800.0, 800.0, 1e4], dtype))
    np.testing.assert_array_equal(actual, np.array([0, 0, 1, 1], dtype), strict=True)
