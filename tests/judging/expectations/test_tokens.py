"""Tokens that rounding may decide: at the edge of top-p, and between two that are nearly equal in float64."""

from unittest.mock import Mock

import numpy as np
import pytest
from helpers.refusals import assert_tells

from llorch.judging.expectations.tokens import GreedyJudge, edge_of_top_p
from llorch.judging.goldens.forward import sampler_inputs
from llorch.judging.runners.numpy import NumpyRunner
from llorch.judging.tolerances.forward import NOTHING_KNOWN, Margins
from llorch.ops.sampling import SamplingSettings, probabilities, softmax
from llorch.stages.comparison import FAIL, TIE, Tolerance

LOGITS, _ = sampler_inputs(range(8), 1000)
AHEAD = np.cumsum(np.sort(softmax(LOGITS.astype(np.float64)))[::-1])[200]  # the mass of all tokens ahead of number 201


@pytest.mark.parametrize(
    ("p", "settings", "swapped", "factor", "excused"),
    [
        (AHEAD + 1e-6, {}, False, 1.0, True),
        (AHEAD + 1e-6, {}, True, 1.0, False),  # llorch lacks it
        (AHEAD + 5.8e-6, {}, False, 1.0, True),  # 4 * 2^-24 * sqrt(2 * 1000 / 3) is 6.2e-6
        (AHEAD + 6.5e-6, {}, False, 1.0, False),
        (AHEAD + 1e-4, {}, False, 1.0, False),  # float32 sums of a thousand terms are nearer
        (AHEAD - 1e-6, {}, True, 1.0, False),  # neither has it
        (AHEAD + 1e-6, {"top_k": 900}, False, 1.0, False),
        (AHEAD + 1e-6, {"min_p": 1e-6}, False, 1.0, False),
        (AHEAD + 1e-6, {"repetition_penalty": 1.1}, False, 1.0, False),
        (AHEAD + 1e-6, {}, False, 1.01, False),
    ],
)
def test_only_a_token_that_the_true_sum_puts_at_the_edge_of_top_p_may_be_missing_from_a_golden(
    p: float, settings: dict[str, float], swapped: bool, factor: float, excused: bool
):
    chosen = SamplingSettings(temperature=1.0, top_p=float(p), **settings)  # pyright: ignore[reportArgumentType]
    ours = probabilities(LOGITS, chosen, ())
    golden = ours.copy()
    golden[np.flatnonzero(ours)[ours[ours > 0].argmin()]] = 0
    golden[ours.argmax()] *= factor
    ours, golden = (golden, ours) if swapped else (ours, golden)
    said = edge_of_top_p(ours, golden, LOGITS, chosen, Tolerance(1e-6, 1e-6))
    assert bool(said) == excused
    if excused:
        assert_tells(said, "1 tokens", "top-p", f"{p - AHEAD:.1e}")


def test_near_tie_gap_is_the_reference_gap_to_the_less_likely_token():
    true, text = np.asarray([[4.0, 3.0, -5.0], [4.0, 3.0, -5.0]]), np.asarray([0, 1])
    known, size = Margins(true, text, 1e-6), np.sqrt(50 / 3)

    def gap(token: int, *expected: int) -> float:
        return known.of(np.asarray(expected), len(expected) - 1, token)[0]

    assert gap(0, 0) == 0
    assert gap(1, 0) == gap(0, 1) == gap(1, 1) == gap(1, 0, 0) == pytest.approx(1 / size)
    assert gap(3, 0) == gap(-1, 0) == gap(0, 1, 0) == np.inf  # no such tokens; after another text than the reference's
    assert known.of(text, 1, 0)[1] == 1e-6 + 2.0**-24
    assert NOTHING_KNOWN.of(text, 0, 0) == (np.inf, 0.0)


MOVED = 1e-3


def with_gap(gap: float) -> np.ndarray:
    """Logits of two steps whose two best tokens are so far apart, in root mean squares of a row."""
    low = np.sqrt((1 + (1 - gap) ** 2 + 4) / 3)  # of a row of 1, 1 - gap, -2, whose root mean square this is
    row = np.asarray([1.0, 1.0 - gap * low, -2.0])
    return np.asarray([row, row])


@pytest.mark.parametrize(
    ("gap", "verdict"), [(0.0, TIE), (0.99 * MOVED, TIE), (1.01 * MOVED, FAIL), (5 * MOVED, FAIL), (np.nan, FAIL)]
)
def test_another_token_is_a_tie_up_to_what_rounding_moves_and_no_farther(gap: float, verdict: str):
    expected = np.asarray([0, 0])
    after: dict[tuple[int, ...], list[int]] = {(7,): [1, 1], (7, 0): [0]}  # right behind the golden's token
    runner = Mock(NumpyRunner)
    runner.name, runner.text = "numpy", lambda ids, n: np.asarray(after[ids][:n])
    tokens = GreedyJudge("m", runner, (7,), Margins(with_gap(gap), None, MOVED))
    comparison = tokens.comparison("12", "generation", "witness", tokens.text((), 2), expected)
    assert comparison.verdict == verdict
    assert_tells(comparison.note, "token 0", f"{MOVED:.1e}")


def test_flips_move_as_far_as_the_variances_of_both_tokens_say():
    logits, variances = np.asarray([[4.0, 3.0, -5.0]]), np.asarray([[1e-4, 4e-4, 9.0]])
    gap, moved = Margins(logits, None, variances).of(np.asarray([0]), 0, 1)
    assert (gap, moved) == (pytest.approx(1 / np.sqrt(50 / 3)), pytest.approx(4 * np.sqrt(1e-3) / np.sqrt(50 / 3)))
