"""Figures of single tokens: loss, divergence, same best token."""

import math

import numpy as np
import pytest

from llorch.apps.evaluate import scores as figures
from llorch.apps.evaluate.scores import PairScores, compare_models, compare_rows, losses, mean, summarise_losses
from llorch.ops.cross_entropy import log_softmax
from llorch.ops.precision import own_dtype_only

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
    np.testing.assert_allclose(np.exp(probabilities).sum(axis=-1), np.ones(6), rtol=1e-14, strict=True)
    np.testing.assert_allclose(log_softmax(rows.astype(np.float64) + 1000), probabilities, atol=1e-12, strict=True)
    np.testing.assert_array_equal(log_softmax(np.array([[3e38, -3e38, 3e38]], np.float32))[0, ::2], [-math.log(2)] * 2)


def test_scores_of_large_arrays_are_float64(rows: np.ndarray, targets: np.ndarray):
    with own_dtype_only():  # ops treat arrays of any size as large
        large_losses, large = losses(rows, targets), compare_rows(rows, -rows, targets)
    np.testing.assert_array_equal(large_losses, losses(rows, targets), strict=True)
    np.testing.assert_array_equal(large.kl, compare_rows(rows, -rows, targets).kl, strict=True)


def test_losses_and_divergences_match_some_worked_by_hand():
    """Both losses belong to their models, and the divergence weighs with the reference."""
    np.testing.assert_allclose(losses(QUARTERS, TARGETS), [math.log(4)], rtol=1e-7)  # the logits are float32
    one, other = compare_rows(HALVES, QUARTERS, TARGETS), compare_rows(QUARTERS, HALVES, TARGETS)
    np.testing.assert_allclose(one.kl, [(math.log(2) + math.log(2 / 3)) / 2], rtol=1e-7)
    np.testing.assert_allclose(other.kl, [math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4], rtol=1e-7)
    np.testing.assert_allclose((one.reference_loss, one.loss), [[math.log(2)], [math.log(4)]], rtol=1e-7)


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


def test_best_of_equally_likely_tokens_is_the_lowest_id():
    tied, later = np.array([[0, 2, 2]], np.float32), np.array([[0, 1, 2]], np.float32)
    assert not compare_rows(tied, later, TARGETS).same_top[0]
    assert compare_rows(tied, tied[:, [0, 2, 1]], TARGETS).same_top[0]


@pytest.mark.parametrize("block", [1, 41 * 4, 10**9])
def test_blocks_change_nothing(
    rows: np.ndarray, targets: np.ndarray, rng: np.random.Generator, block: int, monkeypatch: pytest.MonkeyPatch
):
    other = rows + rng.normal(0, 0.1, rows.shape).astype(np.float32)
    expected = PairScores.join([compare_rows(rows[i : i + 1], other[i : i + 1], targets[i : i + 1]) for i in range(6)])
    monkeypatch.setattr("llorch.apps.evaluate.scores._BLOCK", block)
    actual = compare_rows(rows, other, targets)
    np.testing.assert_array_equal(actual.kl, expected.kl, strict=True)
    np.testing.assert_array_equal(actual.same_top, expected.same_top, strict=True)
    np.testing.assert_array_equal(losses(other, targets), expected.loss, strict=True)
    np.testing.assert_array_equal(actual.reference_loss, expected.reference_loss, strict=True)


def test_parts_are_joined_in_order(rows: np.ndarray, targets: np.ndarray):
    whole = compare_rows(rows, -rows, targets)
    parts = [compare_rows(rows[cut], -rows[cut], targets[cut]) for cut in (slice(0, 2), slice(2, 6))]
    joined = PairScores.join(parts)
    for name in ("reference_loss", "loss", "kl", "same_top"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), strict=True)


@pytest.fixture
def scores(rng: np.random.Generator) -> PairScores:
    """Two models that find the same tokens hard."""
    reference = rng.gamma(2, 1, 400)
    loss, kl, same_top = reference + rng.normal(0.01, 0.05, 400), rng.gamma(0.5, 0.01, 400), rng.random(400) < 0.9
    return PairScores(reference_loss=reference, loss=np.abs(loss), kl=kl, same_top=same_top)


@pytest.fixture
def compared(scores: PairScores) -> figures.ModelDifference:
    return compare_models(scores)


def test_mean_and_error_match_a_row_worked_by_hand():
    estimate = mean(np.array([1.0, 2.0, 3.0, 4.0]))
    assert estimate.value == 2.5
    assert estimate.error == pytest.approx(math.sqrt(5 / 3) / 2, rel=1e-15)  # sample deviation over the root of 4
    assert math.isnan(mean(np.array([2.0])).error)


def test_guessing_evenly_has_the_perplexity_of_the_number_of_choices():
    scores = summarise_losses(np.full(7, math.log(31)))
    assert scores.n_scored == 7
    assert scores.perplexity.value == pytest.approx(31, rel=1e-14)
    assert scores.perplexity.error < 1e-14


def test_the_error_of_a_perplexity_is_relative_to_it():
    scores = summarise_losses(np.array([1.0, 2.0, 3.0, 4.0]))
    assert scores.loss == mean(np.array([1.0, 2.0, 3.0, 4.0]))
    assert scores.perplexity.value == pytest.approx(math.exp(2.5), rel=1e-15)
    assert scores.perplexity.error == pytest.approx(math.exp(2.5) * scores.loss.error, rel=1e-15)
    assert summarise_losses(np.array([800.0, 900.0])).perplexity.value == math.inf


def test_each_perplexity_is_that_of_its_model(scores: PairScores, compared: figures.ModelDifference):
    assert compared.n_scored == 400
    assert compared.kl == mean(scores.kl)
    assert compared.reference_perplexity == summarise_losses(scores.reference_loss).perplexity
    assert compared.perplexity == summarise_losses(scores.loss).perplexity


def test_ratio_and_difference_are_of_the_model_to_the_reference(compared: figures.ModelDifference):
    reference, model = compared.reference_perplexity.value, compared.perplexity.value
    assert model > reference
    assert compared.perplexity_ratio.value == pytest.approx(model / reference, rel=1e-14)
    assert compared.perplexity_log_ratio.value == pytest.approx(math.log(model / reference), rel=1e-12)
    assert compared.perplexity_difference.value == model - reference


def test_errors_count_only_what_is_not_common_to_both_models(scores: PairScores, compared: figures.ModelDifference):
    a, b = scores.reference_loss, scores.loss
    covariance = np.cov(a, b) / 400  # of the two means: the textbook form, which loses digits
    spread = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert compared.perplexity_log_ratio.error == pytest.approx(spread, rel=1e-10)
    assert compared.perplexity_ratio.error == pytest.approx(compared.perplexity_ratio.value * spread, rel=1e-10)
    p, q = compared.reference_perplexity.value, compared.perplexity.value
    spread = math.sqrt(p * p * covariance[0, 0] + q * q * covariance[1, 1] - 2 * p * q * covariance[0, 1])
    assert compared.perplexity_difference.error == pytest.approx(spread, rel=1e-10)
    assert compared.perplexity_difference.error < compared.perplexity.error / 5


def test_quantiles_lie_between_their_neighbours(scores: PairScores):
    kl = np.arange(11.0)[::-1]
    few = PairScores(scores.loss[:11], scores.loss[:11], kl, scores.same_top[:11])
    expected = {"median": 5, "90%": 9, "95%": 9.5, "99%": 9.9, "99.9%": 9.99, "maximum": 10}
    assert compare_models(few).kl_quantiles == pytest.approx(expected, rel=1e-14)


def test_the_share_of_same_tokens_has_the_error_of_a_share(scores: PairScores, compared: figures.ModelDifference):
    share = np.count_nonzero(scores.same_top) / 400
    assert compared.same_top.value == pytest.approx(share, rel=1e-15)
    assert compared.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / 399), rel=1e-12)


def test_probability_changes_match_some_worked_by_hand():
    p, q = np.array([0.5, 0.25, 0.8]), np.array([0.25, 0.5, 0.2])
    compared = compare_models(PairScores(-np.log(p), -np.log(q), np.zeros(3), np.ones(3, bool)))
    changes = np.array([-0.25, 0.25, -0.6])
    square = mean(changes**2)
    assert compared.p_rms.value == pytest.approx(math.sqrt(square.value), rel=1e-14)
    assert compared.p_rms.error == pytest.approx(square.error / 2 / math.sqrt(square.value), rel=1e-12)
    assert compared.p_mean.value == pytest.approx(-0.2, rel=1e-14)
    assert compared.p_max == pytest.approx(0.6, rel=1e-14)


def test_a_model_differs_from_itself_by_exactly_nothing(scores: PairScores):
    same = PairScores(scores.loss, scores.loss, np.zeros(400), np.ones(400, bool))
    compared = compare_models(same)
    for name in ("perplexity_log_ratio", "perplexity_difference", "kl", "p_rms", "p_mean"):
        figure = getattr(compared, name)
        assert (figure.value, figure.error) == (0, 0), name
    assert (compared.perplexity_ratio.value, compared.perplexity_ratio.error) == (1, 0)
    assert (compared.same_top.value, compared.same_top.error) == (1, 0)
    assert compared.p_max == 0
    assert set(compared.kl_quantiles.values()) == {0}
