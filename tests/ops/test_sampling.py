"""Sampling: every filter by numbers worked by hand, then their order, the draw and the refusals."""

import math

import numpy as np
import pytest
from helpers.refusals import refuses

from llorch.ops.sampling import (
    SamplingSettings,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
    probabilities,
    softmax,
)

INF = math.inf


def log_shares(*shares: float) -> np.ndarray:
    """Logits whose softmax is in proportion to `shares`."""
    return np.log(np.array(shares))


def kept_ids(logits: np.ndarray) -> list[int]:
    return [int(index) for index in np.flatnonzero(logits > -INF)]


def test_softmax_matches_shares_worked_by_hand():
    np.testing.assert_allclose(softmax(log_shares(1, 3, 4)), [0.125, 0.375, 0.5], rtol=1e-15)


def test_softmax_of_plus_and_minus_300_is_finite(dtype):
    actual = softmax(np.array([300.0, -300.0, 300.0, -INF], dtype))
    np.testing.assert_allclose(actual, np.array([0.5, 0, 0.5, 0], dtype), atol=1e-200, strict=True)


@pytest.mark.parametrize(
    ("logits", "history", "penalty", "expected"),
    [
        ([4.0, -4.0, 0.0, 3.0], [0, 1, 2], 2.0, [2.0, -8.0, 0.0, 3.0]),
        ([-1.0, -1.5], [0], 2.0, [-2.0, -1.5]),  # never a higher rank: dividing -1 by 2 would keep it first
        ([8.0, 1.0], [0, 0, 0], 2.0, [4.0, 1.0]),  # once, however often it came
        ([4.0, -4.0], [0, 1], 0.5, [8.0, -2.0]),  # below one it encourages
        ([4.0, -4.0], [], 2.0, [4.0, -4.0]),
    ],
)
def test_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens(logits, history, penalty, expected):
    np.testing.assert_array_equal(penalise(np.array(logits), history, penalty=penalty), expected)


SOME = np.array([1.0, 5.0, -2.0, 3.0])
TIES = np.array([3.0, 1.0, 3.0, 5.0, 3.0])
CUMULATED = log_shares(0.15, 0.5, 0.05, 0.3)  # from the top: 0.5, 0.8, 0.95, 1
FALLING = log_shares(0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize(
    ("filtered", "logits", "expected"),
    [
        *((keep_top_k(SOME, k=k), SOME, expected) for k, expected in ((1, [1]), (2, [1, 3]))),
        *((keep_top_k(SOME, k=k), SOME, [0, 1, 2, 3]) for k in (0, 4, 5, 100)),  # 0 or the vocabulary keeps all
        (keep_top_k(TIES, k=2), TIES, [0, 2, 3, 4]),  # ties with the lowest kept
        # The token that crosses the boundary is kept.
        *((keep_top_p(CUMULATED, p=p), CUMULATED, [1, 3]) for p in (0.6, 0.79)),
        (keep_top_p(CUMULATED, p=0.81), CUMULATED, [0, 1, 3]),
        (keep_top_p(CUMULATED, p=0.96), CUMULATED, [0, 1, 2, 3]),
        (keep_top_p(np.array([0.0, -INF, 0.0]), p=0.5), np.zeros(3), [0]),  # met exactly by the first
        (keep_top_p(CUMULATED, p=1e-9), CUMULATED, [1]),
        (keep_top_p(np.array([0.0, -200.0, -INF]), p=1.0), np.array([0.0, -200.0]), [0, 1]),  # even the least likely
        (keep_top_p(np.zeros(5), p=0.5), np.zeros(5), [0, 1, 2]),  # ties go to the lowest id
        (keep_min_p(FALLING, min_p=0.3), FALLING, [0, 1, 2]),  # in proportion to the best
        (keep_min_p(FALLING, min_p=0.6), FALLING, [0, 1]),
        (keep_min_p(FALLING, min_p=0.99), FALLING, [0]),
        (keep_min_p(FALLING, min_p=0.0), FALLING, [0, 1, 2, 3]),
    ],
)
def test_a_filter_keeps_some_logits_as_they_are(filtered, logits, expected):
    assert kept_ids(filtered) == expected
    np.testing.assert_array_equal(filtered[expected], logits[expected])


def test_filters_leave_kept_logits_as_they_are_and_their_input_alone(dtype):
    logits = np.array([1.0, 5.0, -2.0, 3.0], dtype)
    before = logits.copy()
    for filtered in (keep_top_k(logits, k=2), keep_top_p(logits, p=0.9), keep_min_p(logits, min_p=0.1)):
        assert filtered.dtype == dtype
        np.testing.assert_array_equal(filtered[kept_ids(filtered)], logits[kept_ids(filtered)])
        assert kept_ids(filtered) == [1, 3]
    assert penalise(logits, [1, 2], penalty=1.5).dtype == dtype
    assert softmax(logits).dtype == dtype
    np.testing.assert_array_equal(logits, before)


def test_temperature_divides_the_logits():
    actual = probabilities(log_shares(1, 3), SamplingSettings(temperature=0.5), [])
    np.testing.assert_allclose(actual, [0.1, 0.9], rtol=1e-14)  # 1 to 3 squared


def test_temperature_zero_is_the_best_token_and_ties_go_to_the_lowest_id(dtype):
    actual = probabilities(np.array([1.0, 7.0, 7.0], dtype), SamplingSettings(), [])
    np.testing.assert_array_equal(actual, np.array([0, 1, 0], dtype), strict=True)


def test_temperature_zero_still_looks_at_the_penalty():
    assert np.argmax(probabilities(np.array([3.0, 4.0]), SamplingSettings(repetition_penalty=2.0, top_k=1), [1])) == 0


def test_the_lowest_temperature_stays_finite_in_float32():
    actual = probabilities(np.array([50.0, -50.0, 49.9], np.float32), SamplingSettings(temperature=1e-6), [])
    np.testing.assert_array_equal(actual, [1, 0, 0])


def test_penalty_comes_before_top_k():
    settings = SamplingSettings(temperature=1.0, repetition_penalty=4.0, top_k=1)
    np.testing.assert_array_equal(probabilities(np.array([4.0, 3.0, 1.0]), settings, [0]), [0, 1, 0])


def test_temperature_comes_before_top_p():
    logits = log_shares(0.5, 0.3, 0.2)
    assert kept_ids(keep_top_p(logits, p=0.6)) == [0, 1]
    sharp = SamplingSettings(temperature=0.5, top_p=0.6)  # squared: 25/38, 9/38, 4/38
    np.testing.assert_array_equal(probabilities(logits, sharp, []), [1, 0, 0])


def test_top_p_looks_at_what_top_k_left():
    logits = log_shares(0.4, 0.3, 0.2, 0.1)
    settings = SamplingSettings(temperature=1.0, top_k=2, top_p=0.5)  # of 4/7 and 3/7 the first is enough
    np.testing.assert_array_equal(probabilities(logits, settings, []), [1, 0, 0, 0])


def test_min_p_comes_after_top_p():
    logits = log_shares(0.46, 0.3, 0.14, 0.1)
    settings = SamplingSettings(temperature=1.0, top_p=0.8, min_p=0.25)
    # top-p keeps three (0.46, 0.76, 0.90), min-p then all of them; min-p first would leave 0.9 and top-p two
    np.testing.assert_allclose(probabilities(logits, settings, []), [46 / 90, 30 / 90, 14 / 90, 0], rtol=1e-14)


def test_probabilities_sum_to_one_and_keep_dtype(rng, dtype):
    settings = SamplingSettings(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    logits = rng.normal(size=500).astype(dtype) * 4
    before = logits.copy()
    actual = probabilities(logits, settings, [1, 2, 3])
    assert actual.dtype == dtype
    assert actual.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(logits, before)


def test_probabilities_of_float32_logits_are_computed_in_float64_and_rounded_once(rng):
    settings = SamplingSettings(temperature=0.7, top_k=90, top_p=0.95, min_p=0.001, repetition_penalty=1.3)
    logits = rng.normal(size=400).astype(np.float32) * 3
    expected = probabilities(logits.astype(np.float64), settings, [1, 2, 3]).astype(np.float32)
    np.testing.assert_array_equal(probabilities(logits, settings, [1, 2, 3]), expected, strict=True)


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 1), (0.2, 1), (0.2499, 1), (0.25, 3), (0.74, 3), (0.75, 4), (1 - 2**-53, 4)]
)
def test_draw_picks_the_stretch_that_holds_u(u, token):
    assert draw(np.array([0, 0.25, 0, 0.5, 0.25, 0]), u) == token


def test_draw_never_picks_a_removed_token_also_when_the_sum_is_rounded(dtype):
    distribution = np.array([0, 0.1, 0.2, 0.69, 0], dtype)  # sums to 0.99
    assert {draw(distribution, u) for u in np.linspace(0, 1, 1000, endpoint=False)} == {1, 2, 3}
    assert draw(distribution, 1 - 2**-53) == 3


def test_draws_follow_the_distribution(rng):
    counts = np.bincount([draw(np.array([0.1, 0.6, 0.3]), u) for u in rng.random(20_000)], minlength=3)
    np.testing.assert_allclose(counts / 20_000, [0.1, 0.6, 0.3], atol=0.015)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, (0, "1e-6")),
        ("temperature", 1e-7, (0, "1e-6")),
        ("temperature", math.nan, (0, "1e-6")),
        ("temperature", INF, (0, "1e-6")),
        ("top_k", -1, (0,)),
        ("top_p", 0.0, (0, 1)),
        ("top_p", 1.5, (0, 1)),
        ("top_p", math.nan, (0, 1)),
        ("min_p", -0.1, (0, 1)),
        ("min_p", 1.0, (0, 1)),
        ("repetition_penalty", 0.0, (0.001, 1000)),
        ("repetition_penalty", -1.0, (0.001, 1000)),
        ("repetition_penalty", 1000.1, (0.001, 1000)),
        ("repetition_penalty", INF, (0.001, 1000)),
        ("seed", -1, (0,)),
    ],
)
def test_invalid_settings_are_refused_with_name_and_value(name, value, expected):
    with refuses(ValueError, *expected, where=("sampling", name), got=value):
        SamplingSettings(**{name: value})


def test_repeats_are_counted_in_the_answer_and_the_prompt_does_not_count():
    logits = np.zeros(4, np.float32)
    settings = SamplingSettings(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    found = probabilities(logits, settings, [3, 3, 1, 1, 2], n_prompt=2)
    expected = np.exp([0, -0.5 - 0.5, -0.5 - 0.25, 0])
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-6)
