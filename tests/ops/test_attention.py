"""Attention: rows by hand, then causality, head grouping and safe softmax."""

import numpy as np
import pytest

from llorch.ops.attention import attention_context, attention_probs, attention_scores

pytestmark = pytest.mark.usefixtures("arithmetic")

HEADS, KV_HEADS, HEAD_DIM, SEQ = 6, 2, 5, 7


def attend(q, k, v):
    return attention_context(attention_probs(attention_scores(q, k)), v)


@pytest.fixture
def qkv(rng):
    q = rng.normal(size=(SEQ, HEADS, HEAD_DIM))
    k, v = rng.normal(size=(2, KV_HEADS, SEQ, HEAD_DIM))
    return q, k, v


def test_attention_scores_match_products_worked_by_hand():
    q = np.array([[[1.0, 2.0, 0.0, 1.0]], [[0.0, 1.0, 1.0, -1.0]]])  # 2 tokens, 1 head of 4
    k = np.array([[[3.0, 1.0, 5.0, 1.0], [2.0, 4.0, 0.0, 2.0]]])  # scale 1 / sqrt(4)
    np.testing.assert_array_equal(attention_scores(q, k), np.array([[[3.0, -np.inf], [2.5, 1.0]]]))


def test_attention_probs_match_a_row_worked_by_hand():
    scores = np.array([[[np.log(2.0), np.log(6.0), -np.inf]]])
    np.testing.assert_allclose(attention_probs(scores), [[[0.25, 0.75, 0.0]]], rtol=1e-15)


def test_attention_context_joins_heads_one_after_the_other():
    probs = np.array([[[1.0, 0.0], [0.25, 0.75]], [[0.5, 0.5], [0.0, 1.0]]])  # 2 heads, 2 tokens
    v = np.array([[[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]])  # one value head for both
    expected = [[1.0, 2.0, 3.0, 3.0, 4.0, 5.0], [4.0, 5.0, 6.0, 5.0, 6.0, 7.0]]
    np.testing.assert_array_equal(attention_context(probs, v), expected)


def test_attention_masks_exactly_the_keys_after_each_query(qkv):
    q, k, _ = qkv
    masked = np.isneginf(attention_scores(q, k))
    expected = np.arange(SEQ)[None, :] > np.arange(SEQ)[:, None]
    np.testing.assert_array_equal(masked, np.broadcast_to(expected, masked.shape))


def test_attention_ignores_future_tokens(qkv, rng):
    q, k, v = qkv
    changed_k, changed_v = k.copy(), v.copy()
    changed_k[:, 4:], changed_v[:, 4:] = rng.normal(size=(2, KV_HEADS, SEQ - 4, HEAD_DIM))
    np.testing.assert_array_equal(attend(q, changed_k, changed_v)[:4], attend(q, k, v)[:4])
    assert not np.allclose(attend(q, changed_k, changed_v)[4:], attend(q, k, v)[4:])


@pytest.mark.parametrize("cached", [1, 3, SEQ - 1])
def test_attention_after_a_cache_equals_the_last_rows_of_the_whole(qkv, cached):
    q, k, v = qkv
    np.testing.assert_allclose(attend(q[cached:], k, v), attend(q, k, v)[cached:], rtol=1e-13)


def test_query_head_reads_key_head_of_its_group(qkv):
    q, k, v = qkv
    scores, actual = attention_scores(q, k), attend(q, k, v).reshape(SEQ, HEADS, HEAD_DIM)
    for head in range(HEADS):
        own_k, own_v = k[[head // 3]], v[[head // 3]]  # group size 3; head % 2 would be the tiled order
        np.testing.assert_allclose(scores[[head]], attention_scores(q[:, [head]], own_k), rtol=1e-12)
        np.testing.assert_allclose(actual[:, head], attend(q[:, [head]], own_k, own_v), rtol=1e-12)


def test_gqa_with_equal_heads_equals_mha(qkv):
    q, k, v = qkv
    repeated_k, repeated_v = np.repeat(k, 3, axis=0), np.repeat(v, 3, axis=0)  # a key head for every query head
    np.testing.assert_allclose(attend(q, k, v), attend(q, repeated_k, repeated_v), rtol=1e-12)


def test_attention_probs_sum_to_one_over_keys_and_are_zero_where_masked(qkv):
    q, k, _ = qkv
    probs = attention_probs(attention_scores(q, k))
    np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-14)
    assert (probs[:, np.triu(np.ones((SEQ, SEQ), bool), k=1)] == 0).all()
    assert not np.allclose(probs.sum(axis=1), 1)  # not over the queries


def test_attention_probs_do_not_change_when_a_row_is_shifted(rng):
    scores = rng.integers(-5, 5, size=(2, 3, 4)).astype(np.float64)
    np.testing.assert_array_equal(attention_probs(scores + 64), attention_probs(scores))


def test_softmax_of_rows_of_plus_and_minus_300_is_finite(dtype):
    scores = np.array([[[300.0, -300.0, 300.0], [-300.0, -300.0, -np.inf], [-300.0, 300.0, -np.inf]]], dtype)
    np.testing.assert_allclose(attention_probs(scores), [[[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 1, 0]]], atol=1e-200)


def test_softmax_over_many_equal_scores_sums_to_one_in_float32():
    assert abs(float(attention_probs(np.zeros((1, 1, 100_003), np.float32)).sum(dtype=np.float64)) - 1) < 1e-7
