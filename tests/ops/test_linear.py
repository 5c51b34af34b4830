"""Linear projection by hand, for every matrix and by expert; embedding: the right row for every token."""

from typing import Any

import numpy as np
import pytest

from llorch.ops import linear as linear_module
from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import LARGE, CompiledMatrix
from llorch.ops.embedding import embedding
from llorch.ops.linear import linear
from llorch.ops.routing import linear_by_expert, top_k


@pytest.mark.usefixtures("arithmetic")
def test_linear_matches_a_product_worked_by_hand():
    x = np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    weight = np.array([[1.0, 0.0, 2.0], [5.0, -1.0, 0.5]])  # (out, in)
    np.testing.assert_array_equal(linear(x, weight), [[7.0, 4.5], [8.0, 3.0]])


@pytest.mark.usefixtures("arithmetic")
def test_linear_adds_the_bias_to_every_row():
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = np.array([[1.0, 1.0], [1.0, -1.0]])
    bias = np.array([0.5, -10.0])
    np.testing.assert_array_equal(linear(x, weight, bias), [[3.5, -11.0], [7.5, -11.0], [11.5, -11.0]])


@pytest.mark.usefixtures("arithmetic")
def test_linear_reads_a_square_weight_as_out_in():
    weight = np.array([[0.0, 1.0], [0.0, 0.0]])  # output 0 is input 1
    np.testing.assert_array_equal(linear(np.array([[2.0, 7.0]]), weight), [[7.0, 0.0]])


@pytest.mark.usefixtures("arithmetic")
def test_linear_without_bias_equals_a_bias_of_zeros(rng):
    x, weight = rng.normal(size=(5, 7)), rng.normal(size=(3, 7))
    np.testing.assert_array_equal(linear(x, weight), linear(x, weight, np.zeros(3)))


@pytest.mark.usefixtures("arithmetic")
def test_linear_treats_rows_separately(rng):
    x, weight, bias = rng.normal(size=(5, 7)), rng.normal(size=(3, 7)), rng.normal(size=3)
    whole = linear(x, weight, bias)
    np.testing.assert_allclose(whole, np.concatenate([linear(row[None], weight, bias) for row in x]), rtol=1e-12)


@pytest.fixture
def multiplied_in_c(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of inputs that C multiplies."""
    if library() is None:
        pytest.skip("NOT RUN: no C compiler")
    shapes: list[tuple[int, ...]] = []
    multiply = CompiledMatrix.multiply
    monkeypatch.setattr(CompiledMatrix, "multiply", lambda self, x: shapes.append(x.shape) or multiply(self, x))
    return shapes


@pytest.mark.parametrize("n_in", [1024, 1031])
def test_one_row_is_multiplied_in_c_with_a_large_matrix(n_in: int, rng, multiplied_in_c: list[tuple[int, ...]]):
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((1, n_in), (LARGE // 1024, n_in)))
    bias, exact = rng.normal(size=LARGE // 1024).astype(np.float32), x.astype(np.float64) @ weight.astype(np.float64).T
    actual = linear(x, weight, bias)
    assert multiplied_in_c == [x.shape]
    assert actual.dtype == np.float32
    errors = [np.linalg.norm(y - exact) for y in (actual - bias, x @ weight.T)]
    assert errors[0] < max(2 * errors[1], 3e-7 * np.linalg.norm(exact))


@pytest.mark.parametrize("is_available", [True, False])
@pytest.mark.parametrize("case", ["not contiguous", "small", "two rows", "float64", "large"])
def test_other_products_are_left_to_blas(case: str, is_available: bool, rng, multiplied_in_c, monkeypatch):
    monkeypatch.setattr(linear_module, "is_available", lambda: is_available)
    dtype, rows = np.float64 if case == "float64" else np.float32, 2 if case == "two rows" else 1
    x, weight = (rng.normal(size=shape).astype(dtype) for shape in ((rows, 1024), (LARGE // 1024, 1024)))
    if case == "not contiguous":
        weight = np.asfortranarray(weight)
    if case == "small":
        weight = weight[1:]
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(linear(x, weight), expected, rtol=1e-4, atol=1e-4)
    assert bool(multiplied_in_c) is (case == "large" and is_available)


def test_embedding_picks_the_row_of_each_token(rng):
    weight = rng.normal(size=(11, 5))
    actual = embedding(np.array([10, 0, 3, 3]), weight)
    np.testing.assert_array_equal(actual, [weight[10], weight[0], weight[3], weight[3]])


def test_embedding_picks_rows_also_from_a_square_table(rng):
    weight = rng.normal(size=(4, 4))
    np.testing.assert_array_equal(embedding(np.array([2]), weight)[0], weight[2, :])


def test_embedding_is_a_copy_of_the_table(rng):
    weight, ids = rng.normal(size=(3, 5)), np.array([2, 1, 0])
    before = weight.copy()
    embedding(ids, weight)[:] = 0
    np.testing.assert_array_equal(weight, before)
    np.testing.assert_array_equal(ids, [2, 1, 0])


def test_top_k_of_equal_scores_gives_the_lowest_ids_first():
    assert top_k(np.array([[1.0, 3.0, 2.0, 3.0, 3.0]]), 2).tolist() == [[1, 3]]


def test_linear_by_expert_does_not_touch_an_expert_without_tokens():
    class Untouched:
        shape, n_bytes, activations = (5, 4), 0, "F32"
        rows = len

        def forward(self, x: np.ndarray) -> np.ndarray:
            raise AssertionError("decoded without need")

        def dequantize(self) -> np.ndarray:
            raise AssertionError("decoded without need")

    weights: list[Any] = [np.eye(5, 4), Untouched(), np.eye(5, 4) * 2]
    x, ids = np.arange(8.0).reshape(2, 4), np.array([[2, 0], [0, 2]])
    np.testing.assert_array_equal(linear_by_expert(x, ids, weights)[:, :, :4], [[2 * x[0], x[0]], [x[1], 2 * x[1]]])
