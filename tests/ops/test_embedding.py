"""Embedding: the right row for every token."""

import numpy as np

from llorch.ops.embedding import embedding


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
