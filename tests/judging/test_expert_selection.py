"""A choice of experts is a set; who takes whose place is a tie only where rounding decides between the two."""

import numpy as np
import pytest
from helpers.refusals import assert_tells

from llorch.judging.compare import judge
from llorch.judging.expert_selection import ExpertSelection
from llorch.judging.types import Expectation
from llorch.stages.comparison import EXACT, FACTOR, FAIL, PASS, TIE
from llorch.stages.stage_ref import StageRef

SCORES = np.array([[4.0, 3.0, 2.0, 2.0 - 1e-6, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
TOPK_IDS = StageRef("06b", "topk_ids", 0)
IDS = np.array([[0, 1, 2], [4, 3, 2]])


def choice(variance: float) -> ExpertSelection:
    return ExpertSelection(IDS, SCORES, np.full_like(SCORES, variance))


@pytest.mark.parametrize(
    ("selected_ids", "verdict", "goes_on"),
    [
        ([[0, 1, 2], [4, 3, 2]], PASS, IDS),
        ([[2, 0, 1], [2, 3, 4]], PASS, IDS),  # another order is the same selection; the run continues in the engine's
        ([[0, 1, 3], [4, 3, 2]], TIE, IDS),
        ([[0, 1, 4], [4, 3, 2]], FAIL, [[0, 1, 4], [4, 3, 2]]),
        ([[3, 0, 1], [4, 1, 2]], FAIL, [[0, 1, 2], [4, 1, 2]]),  # a tie does not excuse what is wrong elsewhere
        ([[0, 1, 1], [4, 3, 2]], FAIL, [[0, 1, 1], [4, 3, 2]]),
        ([[0, 1, 5], [4, 3, 2]], FAIL, [[0, 1, 5], [4, 3, 2]]),
    ],
)
def test_a_choice(selected_ids: list[list[int]], verdict: str, goes_on: object) -> None:
    actual = np.array(selected_ids)
    expectation = Expectation(TOPK_IDS, "chained", "engine", IDS, EXACT, expert_selection=choice(1e-13))
    comparison = judge(expectation, actual, model="m", backend="numpy")
    assert comparison.verdict == verdict
    assert bool(comparison.note) == (verdict != PASS)
    np.testing.assert_array_equal(choice(1e-13).settled(actual), np.asarray(goes_on))


@pytest.mark.parametrize(("share", "verdict"), [(0.0, TIE), (0.99, TIE), (1.01, FAIL), (5.0, FAIL)])
@pytest.mark.parametrize("better", [True, False], ids=["ours is better", "the witness's is better"])
def test_a_swap_is_a_tie_up_to_what_rounding_moves_whoever_chose_the_better_expert(
    better: bool, share: float, verdict: str
):
    moved = FACTOR * np.sqrt(2 * (1e-6 + 1e-6))  # the scores of both experts are off, in both runs
    scores = np.array([[4.0, 3.0, 2.0, 2.0 + (1 if better else -1) * share * moved]])
    chosen = ExpertSelection(np.array([[0, 1, 2]]), scores, np.full_like(scores, 1e-6))
    expectation = Expectation(TOPK_IDS, "chained", "engine", chosen.ids, EXACT, expert_selection=chosen)
    comparison = judge(expectation, np.array([[0, 1, 3]]), model="m", backend="numpy")
    assert comparison.verdict == verdict
    assert_tells(comparison.note, "token 0", "[3]", "[2]", f"{moved:.1e}")


def test_a_swap_that_rounding_does_not_explain_fails() -> None:
    assert choice(1e-15).difference(np.array([[0, 1, 3], [4, 3, 2]])).error == 0.5
    assert "expected [2]" in choice(1e-15).note(np.array([[0, 1, 3], [4, 3, 2]]))


@pytest.mark.parametrize("selected_ids", [None, IDS.astype(np.float32), IDS[:1]])
def test_what_cannot_be_compared_fails(selected_ids: np.ndarray | None) -> None:
    assert choice(1.0).difference(selected_ids).fault
