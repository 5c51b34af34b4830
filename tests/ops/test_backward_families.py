"""Backward ops of experts and delta nets beside their forward: finite differences, and what they must not do."""

import numpy as np
import pytest
from helpers.finite_differences import assert_is_gradient

from llorch.ops.delta_rule import (
    delta_rule,
    delta_rule_in_chunks,
    l2_norm,
    l2_norm_backward,
    log_decay,
    log_decay_backward,
)
from llorch.ops.delta_rule_backward import AT_ONCE, delta_rule_backward
from llorch.ops.rope import rope_adjacent, rope_adjacent_backward, rope_tables
from llorch.ops.routing import (
    mixed,
    mixed_backward,
    router_probs,
    router_probs_backward,
    top_k,
    topk_weights,
    topk_weights_backward,
)
from llorch.ops.short_conv import short_conv, short_conv_backward
from llorch.ops.sigmoid import sigmoid, sigmoid_backward

pytestmark = pytest.mark.usefixtures("arithmetic")

SEQ, K_HEADS, V_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 6, 4, 3
NAMES = ("q", "k", "v", "beta", "g")


def delta_rule_inputs(rng, seq: int, *, strong: bool = False) -> list[np.ndarray]:
    """What the delta rule is given; `strong` decay forgets nearly everything at some tokens."""
    q, k = l2_norm(rng.normal(size=(2, seq, K_HEADS, KEY_DIM)))
    v, beta = rng.normal(size=(seq, V_HEADS, VALUE_DIM)), rng.uniform(size=(seq, V_HEADS))
    g = -rng.uniform(0.01, 2.0, size=(seq, V_HEADS))
    return [q, k, v, beta, np.where(rng.random(g.shape) < 0.3, -316.0, g) if strong else g]


def empty() -> np.ndarray:
    return np.zeros((V_HEADS, KEY_DIM, VALUE_DIM))


@pytest.mark.parametrize("normalised", [False, True])
def test_gradient_of_expert_weights_reaches_every_logit_but_not_the_selection(rng, normalised):
    logits, grad = rng.normal(size=(5, 7)), rng.normal(size=(5, 3))
    probs = router_probs(logits)
    ids = top_k(probs, 3)
    d_probs = topk_weights_backward(grad, probs, ids, normalised=normalised)
    assert_is_gradient(d_probs, lambda p: float((topk_weights(p, ids, normalised=normalised) * grad).sum()), probs)

    def result(logits: np.ndarray) -> float:
        return float((topk_weights(router_probs(logits), ids, normalised=normalised) * grad).sum())

    d_logits = router_probs_backward(d_probs, probs)
    assert_is_gradient(d_logits, result, logits)
    np.testing.assert_array_equal(np.delete(d_probs[0], ids[0]), 0)
    others = np.abs(np.delete(d_logits[0], ids[0]))
    assert others.max() < 1e-15 if normalised else others.min() > 1e-6  # what is normalised does not see the others


def test_expert_outputs_and_weights_get_their_gradients(rng):
    outs, weights, grad = rng.normal(size=(5, 3, 4)), rng.normal(size=(5, 3)), rng.normal(size=(5, 4))
    d_outs, d_weights = mixed_backward(grad, outs, weights)
    assert_is_gradient(d_outs, lambda outs: float((mixed(outs, weights) * grad).sum()), outs)
    assert_is_gradient(d_weights, lambda weights: float((mixed(outs, weights) * grad).sum()), weights)


@pytest.mark.parametrize("shape", [(5, 1), (4, 6)])
def test_sigmoid_backward_is_the_gradient(rng, shape):
    x, grad = rng.normal(size=shape), rng.normal(size=shape)
    assert_is_gradient(sigmoid_backward(grad, sigmoid(x)), lambda x: float((sigmoid(x) * grad).sum()), x)


@pytest.mark.parametrize("seq", [1, 2, 6])
def test_short_conv_backward_is_the_gradient(rng, seq):
    x, kernel, grad = rng.normal(size=(seq, 5)), rng.normal(size=(5, 4)), rng.normal(size=(seq, 5))
    actual = short_conv_backward(grad, x, kernel)
    assert_is_gradient(actual, lambda x: float((short_conv(x, kernel, np.zeros((3, 5))) * grad).sum()), x)


def test_l2_norm_and_log_decay_backward_are_the_gradients(rng):
    x, grad = rng.normal(size=(2, SEQ, K_HEADS, KEY_DIM))
    assert_is_gradient(l2_norm_backward(grad, x), lambda x: float((l2_norm(x) * grad).sum()), x)
    a, grad = 8 * rng.normal(size=(2, SEQ, V_HEADS))
    bias, decay = rng.normal(size=V_HEADS), -rng.uniform(0.01, 16, V_HEADS)
    actual = log_decay_backward(grad, a, bias, decay)
    assert_is_gradient(actual, lambda a: float((log_decay(a, bias, decay) * grad).sum()), a)
    np.testing.assert_array_equal(log_decay_backward(grad, a + 100, bias, decay), grad * decay)


def test_rope_adjacent_backward_is_the_gradient(rng):
    x, grad = rng.normal(size=(2, SEQ, 3, 8))
    tables = rope_tables(np.arange(SEQ), head_dim=8, theta=100.0, scaling=None)
    actual = rope_adjacent_backward(grad, *tables)
    assert_is_gradient(actual, lambda x: float((rope_adjacent(x, *tables) * grad).sum()), x)


@pytest.mark.parametrize("strong", [False, True])
def test_delta_rule_backward_is_the_gradient(rng, strong):
    arrays, grad = delta_rule_inputs(rng, SEQ, strong=strong), rng.normal(size=(SEQ, V_HEADS, VALUE_DIM))
    for i, actual in enumerate(delta_rule_backward(grad, *arrays)):

        def result(x: np.ndarray, i: int = i) -> float:
            return float((delta_rule(*arrays[:i], x, *arrays[i + 1 :], empty())[0] * grad).sum())  # pyright: ignore

        assert_is_gradient(actual, result, arrays[i], NAMES[i])


def test_gradient_flows_through_the_state_between_chunks(rng):
    seq = 2 * AT_ONCE + 3
    arrays, grad = delta_rule_inputs(rng, seq), np.zeros((seq, V_HEADS, VALUE_DIM))
    arrays[4] *= 0.01
    grad[-1] = rng.normal(size=grad.shape[1:])
    for i, actual in enumerate(delta_rule_backward(grad, *arrays)[1:], start=1):
        direction = rng.normal(size=actual.shape)
        direction[AT_ONCE:] = 0  # of the first stretch alone
        ahead, behind = (
            float(
                (
                    delta_rule_in_chunks(*arrays[:i], arrays[i] + step * direction, *arrays[i + 1 :], empty())[0] * grad  # pyright: ignore
                ).sum()
            )
            for step in (1e-5, -1e-5)
        )
        expected = float((actual * direction).sum())
        assert abs(expected) > 1e-6
        assert (ahead - behind) / 2e-5 == pytest.approx(expected, rel=1e-5), NAMES[i]
