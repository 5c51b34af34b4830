"""Sigmoid: values by hand, then its ends."""

import numpy as np
import pytest

from llorch.ops.sigmoid import sigmoid

pytestmark = pytest.mark.usefixtures("arithmetic")


def test_sigmoid_matches_values_worked_by_hand():
    x = np.array([[0.0, np.log(3.0)], [-np.log(3.0), -np.log(9.0)]])
    np.testing.assert_allclose(sigmoid(x), [[0.5, 0.75], [0.25, 0.1]], rtol=1e-15)


def test_far_from_zero_sigmoid_is_0_or_1_without_a_warning(dtype):
    actual = sigmoid(np.array([-1e4, -800.0, 800.0, 1e4], dtype))
    np.testing.assert_array_equal(actual, np.array([0, 0, 1, 1], dtype), strict=True)
