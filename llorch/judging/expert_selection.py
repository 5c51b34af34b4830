"""Selected experts of a token: a discrete result, for which no tolerance is possible.

A selection is judged as a set. If it differs from the engine's, the exchanged experts must have scores so close in the
float64 reference that rounding decides between them. That is a TIE, and the run continues with the engine's selection,
because otherwise all later stages would differ by a whole expert. Any other difference is a FAIL.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llorch.stages.comparison import FACTOR, Difference, Fault, array_fault

StageOverride = Callable[
    [str, np.ndarray, int], np.ndarray
]  # key, llorch's stage from a token on -> what the run goes on with


def as_made(name: str, array: np.ndarray, start: int) -> np.ndarray:
    """Return every stage as it is."""
    return array


@dataclass(frozen=True)
class ExpertSelection:
    """Experts that a reference engine selected for some tokens.

    Attributes:
        ids: Its experts, (seq, topk); their order says nothing.
        scores: Scores by which experts are selected, in the float64 reference if there is one, (seq, experts).
        variance: By how much two right runs differ there.
    """

    ids: np.ndarray
    scores: np.ndarray
    variance: np.ndarray

    def settled(self, ours: np.ndarray) -> np.ndarray:
        """Return the ids that a run continues with: the reference engine's ids, but llorch's where llorch is wrong."""
        if self.fault(ours):
            return ours
        wrong = self._wrong_tokens(ours)
        made = self.ids.astype(ours.dtype)
        made[wrong] = ours[wrong]
        return made

    def difference(self, ours: "np.ndarray | None") -> Difference:
        """Measure the share of tokens with a wrong selection; ties are not wrong."""
        if fault := self.fault(ours):
            return Difference.of_fault(fault)
        assert ours is not None
        wrong = self._wrong_tokens(ours)
        return Difference(len(wrong) / len(ours), float(bool(wrong)), None, tuple(wrong[:1]))

    def note(self, ours: np.ndarray) -> str:
        """Say where choices differ, and whether rounding explains it; empty where they are equal."""
        notes = []
        for token, actual, expected, gap, moved in self._exchanges(ours):
            notes.append(
                f"token {token}: expected {expected}, got {actual}, float64 gap {gap:.1e}, rounding {moved:.1e}"
            )
            if not gap <= moved:
                return notes[-1]
        more = f" and {len(notes) - 1} tokens more" if len(notes) > 1 else ""
        return f"{notes[0]}{more}; later stages use the reference engine's experts" if notes else ""

    def fault(self, ours: "np.ndarray | None") -> Fault | None:
        """Explain why ids cannot be compared at all; None if they can."""
        if found := array_fault(ours, self.ids):
            return found
        assert ours is not None
        n_experts = self.scores.shape[-1]
        if ours.min() < 0 or ours.max() >= n_experts:
            return "ids", f"expected 0 to {n_experts - 1}, got {ours.min()} to {ours.max()}"
        in_order = np.sort(ours, axis=-1)
        is_twice = (in_order[:, 1:] == in_order[:, :-1]).any()
        return ("ids", "expected different experts, got one twice") if is_twice else None

    def _wrong_tokens(self, ours: np.ndarray) -> list[int]:
        """List the tokens whose experts differ by more than rounding explains."""
        return [token for token, _, _, gap, moved in self._exchanges(ours) if not gap <= moved]

    def _exchanges(self, ours: np.ndarray) -> Iterator[tuple[int, list[int], list[int], float, float]]:
        """Yield the tokens with another set of experts: llorch's and the engine's experts, and what `_gap` returns."""
        for token in np.flatnonzero((np.sort(ours, axis=-1) != np.sort(self.ids, axis=-1)).any(axis=-1)).tolist():
            actual, expected = {*ours[token].tolist()}, {*self.ids[token].tolist()}
            exchanged = sorted(actual - expected), sorted(expected - actual)
            yield token, *exchanged, *self._gap(token, *exchanged)

    def _gap(self, token: int, actual: list[int], expected: list[int]) -> tuple[float, float]:
        """Measure how far llorch's worst expert scores below the best that it replaced.

        Return this distance, and the distance that rounding may move.
        """
        row, variance = self.scores[token].astype(np.float64), self.variance[token].astype(np.float64)
        worst, best = min(actual, key=lambda i: row[i]), max(expected, key=lambda i: row[i])
        moved = FACTOR * np.sqrt(2 * (variance[worst] + variance[best])) + np.finfo(np.float32).tiny
        return float(abs(row[best] - row[worst])), float(moved)
