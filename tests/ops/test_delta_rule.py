"""The gated delta rule: a step by hand, what it remembers and forgets, and chunks that equal the definition."""

import numpy as np
import pytest

from llorch.ops.delta_rule import CHUNK, decays, delta_rule, delta_rule_in_chunks, l2_norm, log_decay

K_HEADS, V_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 7
RULES = (delta_rule, delta_rule_in_chunks)


def inputs(rng, seq: int, strongest: float = -316.0) -> list[np.ndarray]:
    """Keys that resemble those before them, and heads that forget at once beside heads that hardly forget."""
    k = rng.normal(size=(seq, K_HEADS, KEY_DIM))
    k[1:] += 2 * k[:-1]
    q, v = rng.normal(size=(seq, K_HEADS, KEY_DIM)), rng.normal(size=(seq, V_HEADS, VALUE_DIM))
    beta, g = rng.random((seq, V_HEADS)), -np.exp(rng.uniform(-6, np.log(-strongest), (seq, V_HEADS)))
    g[seq // 2, 0] = strongest
    return [l2_norm(q), l2_norm(k), v, beta, g, rng.normal(size=(V_HEADS, KEY_DIM, VALUE_DIM))]


def to_float32(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [array.astype(np.float32) for array in arrays]


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_matches_one_worked_by_hand(rule):
    q, k = np.array([[[0.0, 1.0, 0, 0]]]), np.array([[[0.6, 0.8, 0, 0]]])
    state = np.zeros((1, 4, 1))
    state[0, :2, 0] = [10, 20]
    out, new = rule(q, k, np.array([[[9.0]]]), np.array([[0.5]]), np.log([[0.5]]), state)
    # what is left, (5, 10), says 0.6 * 5 + 0.8 * 10 = 11 of the key; half of 9 - 11 is written along it
    np.testing.assert_allclose(new[0, :, 0], [5 - 0.6, 10 - 0.8, 0, 0], rtol=1e-14)
    np.testing.assert_allclose(out, [[[9.2 / 2]]], rtol=1e-14)
    np.testing.assert_array_equal(state[0, :2, 0], [10, 20])  # whoever fails later has it as it was


@pytest.mark.parametrize("rule", RULES)
def test_value_written_with_beta_1_is_read_at_its_key_and_replaced(rule, rng):
    k, v = l2_norm(np.repeat(rng.normal(size=(1, 1, 4)), 3, axis=0)), rng.normal(size=(3, 1, 2))
    out, _ = rule(k, k, v, np.ones((3, 1)), np.zeros((3, 1)), rng.normal(size=(1, 4, 2)))
    np.testing.assert_allclose(2 * out, v, rtol=1e-5)  # l2_norm leaves a length of 1 - 1e-6


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("seq", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("strongest", [-0.1, -316.0])
def test_chunks_equal_token_by_token(rng, seq, strongest):
    given = inputs(rng, seq, strongest)
    for actual, expected in zip(delta_rule_in_chunks(*given), delta_rule(*given), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1])
def test_two_chunks_equal_one_pass(rng, rule, cut):
    *rows, state = inputs(rng, 2 * CHUNK)
    first, between = rule(*(x[:cut] for x in rows), state)
    second, last = rule(*(x[cut:] for x in rows), between)
    out, expected = rule(*rows, state)
    np.testing.assert_allclose(np.concatenate([first, second]), out, rtol=0, atol=1e-13 * np.abs(out).max())
    np.testing.assert_allclose(last, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("rule", RULES)
def test_in_float32_both_are_within_a_few_roundings(rng, rule):
    given = to_float32(inputs(rng, 2 * CHUNK + 3))
    for actual, expected in zip(rule(*given), delta_rule(*(array.astype(np.float64) for array in given)), strict=True):
        assert actual.dtype == np.float32
        assert relative_error(actual, expected) < 3e-7


def test_small_decays_after_a_complete_decay_keep_their_precision():
    g = np.array([[-1e-3, -316.0, -1e-3, -2e-3]], np.float32)
    exact = g[0].astype(np.float64)
    np.testing.assert_allclose(decays(g)[0, 3, :3], np.exp([exact[1:].sum(), exact[2:].sum(), exact[3]]), rtol=1e-13)
    np.testing.assert_array_equal(decays(g)[0], np.tril(decays(g)[0]))
    assert (decays(np.full((1, CHUNK), -316.0)) == np.tril(decays(np.full((1, CHUNK), -316.0)))).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_value_head_reads_the_key_head_of_its_group(rng, rule):
    q, k, *others = inputs(rng, 9)
    repeated = rule(*(np.repeat(x, V_HEADS // K_HEADS, axis=1) for x in (q, k)), *others)
    for actual, expected in zip(rule(q, k, *others), repeated, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-13)


def test_l2_norm_adds_its_epsilon_to_the_sum_of_squares(dtype):
    x = np.array([[3e-3, 4e-3], [0, 0]], dtype)
    np.testing.assert_allclose(l2_norm(x), x / np.sqrt([[25e-6 + 1e-6], [1]]), rtol=3e-7)


def test_log_decay_matches_values_worked_by_hand(dtype):
    a, bias = np.array([[0.0, 21.0, -800.0, 1000.0]], dtype), np.array([np.log(3), 1, 0, 0], dtype)
    actual = log_decay(a, bias, np.array([-2, -0.5, -3, -16], dtype))
    np.testing.assert_allclose(actual, [[-2 * np.log(4), -11, 0, -16000]], rtol=3e-7)
