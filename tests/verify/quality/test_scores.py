"""Figures of single tokens: loss, divergence, same best token."""

import math

import numpy as np
import pytest

from llorch.verify.quality import PairScores, compare_rows, log_softmax, losses

HALVES = np.log(np.array([[1, 1]], np.float32))
QUARTERS = np.log(np.array([[1, 3]], np.float32))
TARGETS = np.array([0])


@pytest.fixture
def rows(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 5, (6, 41)).astype(np.float32)


@pytest.fixture
def targets(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 41, 6)


def test_log_probabilities_are_of_distributions_in_float64(rows: np.ndarray):
    probabilities = log_softmax(rows)
    assert probabilities.dtype == np.float64
    np.testing.assert_allclose(np.exp(probabilities).sum(axis=-1), np.ones(6), rtol=1e-14, strict=True)


def test_a_constant_added_to_all_logits_changes_nothing(rows: np.ndarray):
    np.testing.assert_allclose(log_softmax(rows.astype(np.float64) + 1000), log_softmax(rows), atol=1e-12, strict=True)


def test_logits_near_the_end_of_float32_do_not_overflow():
    np.testing.assert_array_equal(log_softmax(np.array([[3e38, -3e38, 3e38]], np.float32))[0, ::2], [-math.log(2)] * 2)


def test_loss_is_minus_the_log_probability_of_the_right_token():
    np.testing.assert_allclose(losses(QUARTERS, TARGETS), [math.log(4)], rtol=1e-7)  # the logits are float32


def test_divergence_matches_one_worked_by_hand():
    kl = compare_rows(HALVES, QUARTERS, TARGETS).kl
    np.testing.assert_allclose(kl, [(math.log(2) + math.log(2 / 3)) / 2], rtol=1e-7)


def test_divergence_weighs_with_the_reference():
    kl = compare_rows(QUARTERS, HALVES, TARGETS).kl
    np.testing.assert_allclose(kl, [math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4], rtol=1e-7)


def test_both_losses_belong_to_their_models():
    scores = compare_rows(HALVES, QUARTERS, TARGETS)
    np.testing.assert_allclose(scores.reference_loss, [math.log(2)], rtol=1e-7)
    np.testing.assert_allclose(scores.loss, [math.log(4)], rtol=1e-7)


def test_equal_rows_have_a_divergence_of_exactly_zero(rows: np.ndarray, targets: np.ndarray):
    scores = compare_rows(rows, rows.copy(), targets)
    np.testing.assert_array_equal(scores.kl, np.zeros(6), strict=True)
    np.testing.assert_array_equal(scores.loss, scores.reference_loss, strict=True)
    assert scores.same_top.all()


def test_a_token_that_a_model_rules_out_costs_what_its_logits_say():
    sure, wrong = np.array([[800, 0]], np.float32), np.array([[0, 800]], np.float32)
    assert compare_rows(sure, wrong, TARGETS).kl == [800]


def test_the_best_token_is_the_same_whatever_its_probability(rows: np.ndarray, targets: np.ndarray):
    other = rows.copy()
    other[2, (rows[2].argmax() + 1) % 41] = 99
    expected = [True, True, False, True, True, True]
    np.testing.assert_array_equal(compare_rows(rows, other / 2, targets).same_top, expected)


def test_of_equally_likely_tokens_the_lowest_id_is_the_best():
    tied, later = np.array([[0, 2, 2]], np.float32), np.array([[0, 1, 2]], np.float32)
    assert not compare_rows(tied, later, TARGETS).same_top[0]
    assert compare_rows(tied, tied[:, [0, 2, 1]], TARGETS).same_top[0]


@pytest.mark.parametrize("block", [1, 41 * 4, 10**9])
def test_blocks_change_nothing(
    rows: np.ndarray, targets: np.ndarray, rng: np.random.Generator, block: int, monkeypatch: pytest.MonkeyPatch
):
    other = rows + rng.normal(0, 0.1, rows.shape).astype(np.float32)
    expected = PairScores.join([compare_rows(rows[i : i + 1], other[i : i + 1], targets[i : i + 1]) for i in range(6)])
    monkeypatch.setattr("llorch.verify.quality.scores._BLOCK", block)
    got = compare_rows(rows, other, targets)
    np.testing.assert_array_equal(got.kl, expected.kl, strict=True)
    np.testing.assert_array_equal(got.same_top, expected.same_top, strict=True)
    np.testing.assert_array_equal(losses(other, targets), expected.loss, strict=True)
    np.testing.assert_array_equal(got.reference_loss, expected.reference_loss, strict=True)


def test_parts_are_joined_in_order(rows: np.ndarray, targets: np.ndarray):
    whole = compare_rows(rows, -rows, targets)
    parts = [compare_rows(rows[cut], -rows[cut], targets[cut]) for cut in (slice(0, 2), slice(2, 6))]
    joined = PairScores.join(parts)
    for name in ("reference_loss", "loss", "kl", "same_top"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), strict=True)
