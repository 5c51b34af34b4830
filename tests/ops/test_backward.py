"""Every backward op beside its forward: finite differences, then what must hold where a difference cannot look."""

import numpy as np
import pytest
from helpers.finite_differences import assert_is_gradient

from llorch.ops.attention import (
    attention_context,
    attention_context_backward,
    attention_probs,
    attention_probs_backward,
    attention_scores,
    attention_scores_backward,
)
from llorch.ops.embedding import embedding, embedding_backward
from llorch.ops.linear import linear, linear_backward
from llorch.ops.rms_norm import rms_norm, rms_norm_backward
from llorch.ops.rope import rope, rope_backward, rope_tables
from llorch.ops.swiglu import swiglu, swiglu_backward

pytestmark = pytest.mark.usefixtures("arithmetic")

HEADS, KV_HEADS, HEAD_DIM, SEQ = 6, 2, 4, 5
MASKED = np.arange(SEQ)[None, :] > np.arange(SEQ)[:, None]


@pytest.fixture
def qkv(rng):
    q = rng.normal(size=(SEQ, HEADS, HEAD_DIM))
    k, v = rng.normal(size=(2, KV_HEADS, SEQ, HEAD_DIM))
    return q, k, v


@pytest.fixture
def probs(qkv):
    return attention_probs(attention_scores(qkv[0], qkv[1]))


def test_embedding_backward_is_the_gradient_and_sums_over_repeated_tokens(rng):
    ids, table, grad = np.array([3, 0, 3, 5, 3]), rng.normal(size=(7, 4)), rng.normal(size=(5, 4))
    actual = embedding_backward(grad, ids, vocab_size=7)
    assert_is_gradient(actual, lambda w: float((embedding(ids, w) * grad).sum()), table)
    np.testing.assert_array_equal(actual[[1, 2, 4, 6]], 0)


def test_linear_backward_is_the_gradient(rng):
    x, weight, grad = rng.normal(size=(5, 4)), rng.normal(size=(3, 4)), rng.normal(size=(5, 3))
    assert_is_gradient(linear_backward(grad, weight), lambda x: float((linear(x, weight, np.ones(3)) * grad).sum()), x)


@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 6)])  # rows of a block, heads of qk_norm
def test_rms_norm_backward_is_the_gradient(rng, shape):
    x, weight, grad = rng.normal(size=shape), rng.normal(size=shape[-1]), rng.normal(size=shape)
    actual = rms_norm_backward(grad, x, weight, eps=0.3)
    assert_is_gradient(actual, lambda x: float((rms_norm(x, weight, eps=0.3) * grad).sum()), x)


def test_rms_norm_backward_has_nothing_along_the_row_as_eps_vanishes(rng):
    x, weight, grad = rng.normal(size=(5, 6)), rng.normal(size=6), rng.normal(size=(5, 6))
    np.testing.assert_allclose((rms_norm_backward(grad, x, weight, eps=1e-300) * x).sum(axis=-1), 0, atol=1e-14)


def test_rms_norm_backward_of_a_row_of_zeros_is_finite():
    actual = rms_norm_backward(np.ones((1, 4)), np.zeros((1, 4)), np.full(4, 2.0), eps=1e-6)
    np.testing.assert_allclose(actual, 2e3, rtol=1e-12)


def test_rope_backward_is_the_gradient(rng):
    x, grad = rng.normal(size=(2, 3, 4, 6))
    cos, sin = rope_tables(np.array([0, 2, 900]), head_dim=6, theta=100.0, scaling=None)
    assert_is_gradient(rope_backward(grad, cos, sin), lambda x: float((rope(x, cos, sin) * grad).sum()), x)


def test_rope_backward_undoes_the_rotation(rng):
    x = rng.normal(size=(3, 4, 6))
    cos, sin = rope_tables(np.array([1, 7, 4000]), head_dim=6, theta=100.0, scaling=None)
    np.testing.assert_allclose(rope_backward(rope(x, cos, sin), cos, sin), x, rtol=0, atol=1e-14)


def test_swiglu_backward_is_the_gradient(rng):
    gate, up, grad = rng.normal(size=(3, 5, 4)) * 2
    d_gate, d_up = swiglu_backward(grad, gate, up)
    assert_is_gradient(d_gate, lambda gate: float((swiglu(gate, up) * grad).sum()), gate, "gate")
    assert_is_gradient(d_up, lambda up: float((swiglu(gate, up) * grad).sum()), up, "up")


def test_swiglu_backward_of_extreme_gates_has_its_limits_without_a_warning(dtype):
    gate, up = np.array([[-1e30, -800.0, 0.0, 800.0]], dtype), np.array([[3.0, -2.0, 4.0, 5.0]], dtype)
    d_gate, d_up = swiglu_backward(np.ones((1, 4), dtype), gate, up)
    np.testing.assert_array_equal(d_gate, np.array([[0, 0, 2, 5]], dtype), strict=True)
    np.testing.assert_array_equal(d_up, np.array([[0, 0, 0, 800]], dtype), strict=True)


def test_attention_scores_backward_is_the_gradient(qkv, rng):
    q, k, _ = qkv
    grad = np.where(MASKED, 0, rng.normal(size=(HEADS, SEQ, SEQ)))
    d_q, d_k = attention_scores_backward(grad, q, k)

    def weighed(q, k):
        return float((np.where(MASKED, 0, attention_scores(q, k)) * grad).sum())

    assert_is_gradient(d_q, lambda q: weighed(q, k), q, "q")
    assert_is_gradient(d_k, lambda k: weighed(q, k), k, "k")


def test_attention_probs_backward_is_the_gradient(qkv, rng):
    scores, grad = attention_scores(qkv[0], qkv[1]), rng.normal(size=(HEADS, SEQ, SEQ))
    actual = attention_probs_backward(grad, attention_probs(scores))
    visible_scores = np.where(MASKED, 0.0, scores)

    def weighed(visible_scores):
        return float((attention_probs(np.where(MASKED, -np.inf, visible_scores)) * grad).sum())

    assert_is_gradient(actual, weighed, visible_scores)


def test_attention_probs_backward_is_0_under_the_mask_and_in_the_sum_of_every_row(probs, rng):
    actual = attention_probs_backward(rng.normal(size=(HEADS, SEQ, SEQ)), probs)
    assert not actual[:, MASKED].any()
    np.testing.assert_allclose(actual.sum(axis=-1), 0, atol=1e-15)


def test_attention_probs_backward_of_scores_of_plus_and_minus_300_is_finite(dtype):
    scores = np.array([[[300.0, -np.inf, -np.inf], [300, -300, -np.inf], [-300, -300, -300]]], dtype)
    actual = attention_probs_backward(np.array([[[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]], dtype), attention_probs(scores))
    np.testing.assert_allclose(actual, [[[0, 0, 0], [0, 0, 0], [-1 / 3, 0, 1 / 3]]], rtol=0, atol=1e-6)


def test_attention_context_backward_is_the_gradient(probs, qkv, rng):
    v, grad = qkv[2], rng.normal(size=(SEQ, HEADS * HEAD_DIM))
    d_probs, d_v = attention_context_backward(grad, probs, v)
    assert_is_gradient(d_probs, lambda p: float((attention_context(p, v) * grad).sum()), probs, "probs")
    assert_is_gradient(d_v, lambda v: float((attention_context(probs, v) * grad).sum()), v, "v")


def test_key_gradient_sums_over_the_query_heads_of_its_group(qkv, rng):
    q, k, _ = qkv
    group = HEADS // KV_HEADS
    grad = np.where(MASKED, 0, rng.normal(size=(HEADS, SEQ, SEQ)))
    _, d_k = attention_scores_backward(grad, q, k)
    _, by_head = attention_scores_backward(grad, q, k.repeat(group, axis=0))  # every query head has its own key head
    np.testing.assert_allclose(d_k, by_head.reshape(KV_HEADS, group, SEQ, HEAD_DIM).sum(axis=1), rtol=0, atol=1e-14)


def test_attention_has_no_gradient_by_masked_keys(qkv, rng):
    q, k, v = qkv
    probs, grad = attention_probs(attention_scores(q, k)), rng.normal(size=(SEQ, HEADS * HEAD_DIM))
    grad[3:] = 0  # only the first three queries matter
    d_probs, d_v = attention_context_backward(grad, probs, v)
    d_q, d_k = attention_scores_backward(attention_probs_backward(d_probs, probs), q, k)
    for gradient in (d_q.swapaxes(0, 1), d_k, d_v):
        assert gradient[:, :3].any()
        assert not gradient[:, 3:].any()
