"""Linear projection: a matrix by hand, then what must hold for every one."""

import numpy as np
import pytest

from llorch.ops.linear import linear

pytestmark = pytest.mark.usefixtures("arithmetic")


def test_linear_matches_a_product_worked_by_hand():
    x = np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    weight = np.array([[1.0, 0.0, 2.0], [5.0, -1.0, 0.5]])  # (out, in)
    np.testing.assert_array_equal(linear(x, weight), [[7.0, 4.5], [8.0, 3.0]])


def test_linear_adds_the_bias_to_every_row():
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = np.array([[1.0, 1.0], [1.0, -1.0]])
    bias = np.array([0.5, -10.0])
    np.testing.assert_array_equal(linear(x, weight, bias), [[3.5, -11.0], [7.5, -11.0], [11.5, -11.0]])


def test_linear_reads_a_square_weight_as_out_in():
    weight = np.array([[0.0, 1.0], [0.0, 0.0]])  # output 0 is input 1
    np.testing.assert_array_equal(linear(np.array([[2.0, 7.0]]), weight), [[7.0, 0.0]])


def test_linear_without_bias_equals_a_bias_of_zeros(rng):
    x, weight = rng.normal(size=(5, 7)), rng.normal(size=(3, 7))
    np.testing.assert_array_equal(linear(x, weight), linear(x, weight, np.zeros(3)))


def test_linear_treats_rows_separately(rng):
    x, weight, bias = rng.normal(size=(5, 7)), rng.normal(size=(3, 7)), rng.normal(size=3)
    whole = linear(x, weight, bias)
    np.testing.assert_allclose(whole, np.concatenate([linear(row[None], weight, bias) for row in x]), rtol=1e-12)
