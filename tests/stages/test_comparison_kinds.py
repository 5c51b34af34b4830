"""The comparison of masked scores, of integers, of whole traces, and in units."""

import math

import numpy as np
import pytest
from helpers.refusals import assert_tells, refuses

from llorch.stages.comparison import EXACT, Difference, Report, Tolerance, compare, measure, measure_in

ANYTHING = Tolerance(math.inf, math.inf)
TIGHT = Tolerance(1e-6, 1e-6)


@pytest.fixture
def scores(rng) -> np.ndarray:
    scores = rng.normal(size=(2, 4, 4))
    scores[:, np.triu(np.ones((4, 4), bool), k=1)] = -np.inf
    return scores


def trace(rng) -> dict[str, np.ndarray]:
    scores = rng.normal(size=(2, 3, 3))
    scores[:, 0, 1:] = -np.inf
    return {"embed": rng.normal(size=(3, 8)), "l0.attn_scores": scores, "l1.q_rope": rng.normal(size=(3, 2, 4))}


def test_masked_scores_pass_only_where_masking_is_expected(scores):
    assert measure(scores.copy(), scores, masked=True).within(EXACT)
    assert measure(scores.copy(), scores).fault == "non-finite: 12 of 32 actual values"


def test_one_visible_score_that_differs_fails(scores):
    actual = scores.copy()
    actual[1, 3, 2] += 0.1
    difference = measure(actual, scores, masked=True)
    assert not difference.within(TIGHT)
    assert difference.index == (1, 3, 2)


@pytest.mark.parametrize("side", ["actual", "expected"])
def test_masks_that_differ_by_one_entry_fail(scores, side):
    actual = scores.copy()
    (actual if side == "actual" else scores)[0, 1, 2] = -1e4  # a large finite number in place of -inf
    difference = measure(actual, scores, masked=True)
    assert_tells(difference.fault or "", "mask", "1 of 32")
    assert not difference.within(ANYTHING)


def test_other_masks_fail(scores):
    fault = measure(scores[:, ::-1].copy(), scores, masked=True).fault  # of equal size, in other places
    assert_tells(fault or "", "mask", "16 of 32")
    everything = np.full((2, 3), -np.inf)
    fault = measure(everything.copy(), everything, masked=True).fault
    assert (fault or "").startswith("mask: ")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_masking_allows_only_minus_infinity(scores, value):
    scores[0, 0, 3] = value
    difference = measure(scores.copy(), scores, masked=True)
    assert difference.fault == "non-finite: 1 of 32 actual values"


@pytest.mark.parametrize("dtype_", [np.int32, np.int64, np.uint8])
def test_equal_integers_pass_exactly(dtype_):
    ids = np.array([3, 1, 2], dtype_)
    assert measure(ids.copy(), ids).within(EXACT)
    assert measure(ids.copy(), ids, masked=True).within(EXACT)


def test_one_wrong_integer_fails_however_many_are_right():
    expected = np.arange(1_000_000)
    actual = expected.copy()
    actual[123_456] += 1
    difference = measure(actual, expected)
    assert difference == Difference(1e-6, 1.0, None, (123_456,), 123_457.0, 123_456.0)
    assert not difference.within(Tolerance(1e-5, 1e-4))


def test_integers_beyond_float64_and_of_other_widths_are_distinguished():
    expected = np.array([2**53, 2**63 - 1])
    actual = np.array([2**53 + 1, 2**63 - 1])
    assert measure(actual, expected).index == (0,)
    assert not measure(actual, expected).within(Tolerance(1e-5, 1e-4))
    assert measure(np.array([0], np.uint8), np.array([255], np.uint8)).worst == 1
    assert measure(np.array([1], np.int32), np.array([1])).fault == "dtype: expected int64, got int32"


def test_equal_traces_agree(rng):
    one = trace(rng)
    report = compare({key: array.copy() for key, array in one.items()}, one, EXACT)
    assert report.agrees
    assert str(report) == "3 stages agree"
    assert list(report.differences) == list(one)


def test_first_divergence_is_first_in_the_forward_pass_whatever_the_order_of_both(rng):
    expected = trace(rng)
    actual = {key: expected[key] * 2 for key in reversed(expected)}
    actual["embed"] = expected["embed"]
    report = compare(actual, dict(sorted(expected.items(), reverse=True)))
    assert list(report.differences) == list(expected)
    assert report.first_divergence == "l0.attn_scores"
    assert str(report).startswith("l0.attn_scores: error 1.0e+00, worst 1.0e+00 at (")
    assert str(report).endswith("; first failing stage, 1 before it passed")


@pytest.mark.parametrize("side", ["actual", "expected"])
@pytest.mark.parametrize("key", ["embed", "l0.attn_scores", "l1.q_rope"])
def test_a_stage_on_one_side_only_is_reported_and_no_divergence(rng, key, side):
    whole = trace(rng)
    part = {name: array for name, array in whole.items() if name != key}
    report = compare(whole, part, ANYTHING) if side == "actual" else compare(part, whole, ANYTHING)
    assert (report.first_divergence, report.agrees, report.only[side]) == (None, False, [key])
    assert str(report) == f"2 stages agree; only in {side}: {key}"


@pytest.mark.parametrize("key", ["embed", "l1.q_rope"])
def test_only_scores_may_hold_minus_infinity(rng, key):
    expected = trace(rng)
    expected[key][0, 0] = -np.inf
    assert compare(dict(expected), expected, ANYTHING).first_divergence == key


def test_swapped_heads_diverge(rng):
    expected = trace(rng)
    actual = expected | {"l1.q_rope": expected["l1.q_rope"][:, ::-1]}
    assert compare(actual, expected).first_divergence == "l1.q_rope"


def test_default_tolerance_of_a_trace_is_1e_5_and_1e_4():
    expected = {"embed": np.ones(1000)}
    assert compare({"embed": np.ones(1000) * (1 + 0.9e-5)}, expected).first_divergence is None
    assert compare({"embed": np.ones(1000) * (1 + 1.1e-5)}, expected).first_divergence == "embed"
    one_off = np.ones(1000)
    one_off[5] += 1.1e-4  # 3.5e-6 of the whole tensor
    assert compare({"embed": one_off}, expected).first_divergence == "embed"


@pytest.mark.parametrize("expected", [{}, {"embed": np.ones(2)}])
def test_traces_without_a_common_stage_are_an_error(expected):
    with refuses(ValueError, got=f"0 and {len(expected)}", where="compare"):
        compare({}, expected)


def test_report_first_divergence_uses_its_own_tolerance():
    difference = {"embed": Difference(1e-3, 1e-3, None, (0,), 1.0, 2.0)}
    assert Report(difference, Tolerance(1e-2, 1e-2)).first_divergence is None
    assert Report(difference, Tolerance(1e-4, 1e-2)).first_divergence == "embed"


def test_a_difference_in_units_worked_by_hand():
    found = measure_in(np.array([1.0, 2.0, 5.0]), np.array([1.0, 2.4, 4.7]), unit=0.1)
    assert found.error == pytest.approx(math.sqrt((16 + 9) / 3))
    assert found.worst == pytest.approx(4)
    assert found.index == (1,)


def test_the_size_of_the_numbers_does_not_count():
    near, far = (measure_in(np.array([x, 0.25]), np.array([x, 0.5]), unit=0.5) for x in (1.0, 1e6))
    assert (near.error, near.worst) == (far.error, far.worst) == (math.sqrt(0.125), 0.5)


@pytest.mark.parametrize("actual", [None, np.ones(3), np.ones(2, np.float32), np.array([1.0, np.nan])])
def test_incomparable_arrays_never_pass(actual: np.ndarray | None):
    found = measure_in(actual, np.ones(2), unit=1.0)
    assert found.fault is not None
    assert not found.within(ANYTHING)
