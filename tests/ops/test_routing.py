"""Experts are chosen and computed as the module says, without transformers."""

from typing import Any

import numpy as np

from llorch.ops.routing import linear_by_expert, top_k


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
