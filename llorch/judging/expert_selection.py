"""Selected experts of a token: a discrete result, for which no tolerance is possible.

A selection is compared as a set. A differing selection is a TIE if the exchanged experts have scores so close in the
float64 reference that rounding decides between them. llorch's run then continues with the engine's selection, because
otherwise all later stages would differ by a whole expert. Any other difference is a FAIL, and llorch's selection stays.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llorch.stages.comparison import FACTOR, Difference, Fault, array_fault

StageOverride = Callable[
    [str, np.ndarray, int], np.ndarray
]  # (trace key, llorch's stage output, its first token) -> stage output with which the run continues


def identity(name: str, array: np.ndarray, start: int) -> np.ndarray:
    """Return the stage output unchanged: the `StageOverride` that overrides nothing."""
    return array


@dataclass(frozen=True)
class ExpertSelection:
    """Experts that a reference engine selected for some tokens.

    Attributes:
        ids: Selected experts in any order, (seq, topk).
        scores: Scores by which experts are selected, in the float64 reference if there is one, (seq, experts).
        variance: Variance of the scores between two correct runs, (seq, experts).
    """

    ids: np.ndarray
    scores: np.ndarray
    variance: np.ndarray

    def settled(self, actual: np.ndarray) -> np.ndarray:
        """Return the ids with which llorch continues: the engine's, except for tokens whose selection is wrong."""
        if self.fault(actual):
            return actual
        wrong = self._wrong_tokens(actual)
        settled_ids = self.ids.astype(actual.dtype)
        settled_ids[wrong] = actual[wrong]
        return settled_ids

    def difference(self, actual: "np.ndarray | None") -> Difference:
        """Measure the share of tokens with a wrong selection; ties are not wrong."""
        if fault := self.fault(actual):
            return Difference.from_fault(fault)
        assert actual is not None
        wrong = self._wrong_tokens(actual)
        return Difference(len(wrong) / len(actual), float(bool(wrong)), None, tuple(wrong[:1]))

    def note(self, actual_ids: np.ndarray) -> str:
        """Describe the first wrong selection, else the first near-tie and how many more; empty if none differs."""
        notes = []
        for token, actual, expected, gap, gap_tolerance in self._exchanges(actual_ids):
            notes.append(
                f"token {token}: expected {expected}, got {actual}, float64 gap {gap:.1e}, rounding {gap_tolerance:.1e}"
            )
            if not gap <= gap_tolerance:  # `not`, so that a NaN is wrong
                return notes[-1]
        rest_note = f" and {len(notes) - 1} tokens more" if len(notes) > 1 else ""
        return f"{notes[0]}{rest_note}; later stages use the reference engine's experts" if notes else ""

    def fault(self, actual: "np.ndarray | None") -> Fault | None:
        """Explain why ids cannot be compared at all, such as an expert selected twice; None if they can."""
        if fault := array_fault(actual, self.ids):
            return fault
        assert actual is not None
        n_experts = self.scores.shape[-1]
        if actual.min() < 0 or actual.max() >= n_experts:
            return "ids", f"expected 0 to {n_experts - 1}, got {actual.min()} to {actual.max()}"
        in_order = np.sort(actual, axis=-1)
        is_twice = (in_order[:, 1:] == in_order[:, :-1]).any()
        return ("ids", "expected different experts, got one twice") if is_twice else None

    def _wrong_tokens(self, actual: np.ndarray) -> list[int]:
        """List the tokens whose experts differ by more than rounding explains."""
        return [token for token, _, _, gap, gap_tolerance in self._exchanges(actual) if not gap <= gap_tolerance]

    def _exchanges(self, actual_ids: np.ndarray) -> Iterator[tuple[int, list[int], list[int], float, float]]:
        """Yield tokens with different experts: the token, experts of llorch only, of the engine only, and `_gap`."""
        for token in np.flatnonzero((np.sort(actual_ids, axis=-1) != np.sort(self.ids, axis=-1)).any(axis=-1)).tolist():
            actual, expected = {*actual_ids[token].tolist()}, {*self.ids[token].tolist()}
            exchanged = sorted(actual - expected), sorted(expected - actual)
            yield token, *exchanged, *self._gap(token, *exchanged)

    def _gap(self, token: int, actual: list[int], expected: list[int]) -> tuple[float, float]:
        """Return the score gap from llorch's worst exchanged expert to the best that it replaced, and its tolerance."""
        row, variance = self.scores[token].astype(np.float64), self.variance[token].astype(np.float64)
        worst, best = min(actual, key=lambda expert: row[expert]), max(expected, key=lambda expert: row[expert])
        gap_tolerance = (
            FACTOR * np.sqrt(2 * (variance[worst] + variance[best])) + np.finfo(np.float32).tiny
        )  # exact tie
        return float(abs(row[best] - row[worst])), float(gap_tolerance)
