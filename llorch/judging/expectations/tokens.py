"""Checkpoints 10 to 12, where ours and a golden are equal or not, or differ where rounding decides."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from llorch.judging.compare import as_tie, compare_exact
from llorch.judging.runners import Runner
from llorch.judging.tolerances.forward import Margins, moved_past_p
from llorch.judging.types import Comparison
from llorch.ops.sampling import SamplingSettings
from llorch.stages.comparison import Tolerance, measure
from llorch.stages.stage_ref import StageRef


class GreedyJudge:
    """Judges greedy tokens of one runner: a TIE if they differ from the golden only at near-ties in float64."""

    def __init__(self, model: str, runner: Runner, prompt: Sequence[int], margins: Margins) -> None:
        """Take a prompt, the runner that continues it, and the margins of near-ties."""
        self._model, self._runner, self._prompt, self._margins = model, runner, prompt, margins

    def text(self, after: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate llorch's tokens after the prompt and some more tokens."""
        return self._runner.text((*self._prompt, *after), n_tokens)

    def comparison(
        self, checkpoint: str, stage: str, engine: str, actual: np.ndarray, expected: np.ndarray
    ) -> Comparison:
        """Judge a text, or the first token of a text."""
        difference = measure(actual, expected)
        comparison = compare_exact(
            StageRef(checkpoint, stage), engine, difference.error, difference.fault or "",
            model=self._model, backend=self._runner.name,
        )  # fmt: skip
        notes: list[str] = []
        for at, token in self._departures(actual, expected) if difference.fault is None else ():
            gap, moved = self._margins.of(expected, at, token)
            notes.append(
                f"token {at}: expected {expected[at]}, got {token}, float64 gap {gap:.1e}, rounding {moved:.1e}"
            )
            if not gap <= moved:
                return replace(comparison, note=notes[-1])
        return as_tie(comparison, "; ".join(notes)) if notes else comparison

    def _departures(self, actual: np.ndarray, expected: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield each token at which llorch's text departs from the golden's, and llorch's token.

        The text then starts again after the golden's token.
        """
        at = 0
        while at < len(expected):
            pairs = enumerate(zip_longest(actual.tolist(), expected[at:].tolist(), fillvalue=-1))
            apart = next(((n, ours) for n, (ours, theirs) in pairs if ours != theirs), None)
            if apart is None:
                return
            yield at + apart[0], apart[1]
            at += apart[0] + 1
            actual = self.text(expected[:at].tolist(), len(expected) - at) if at < len(expected) else actual


def edge_of_top_p(
    ours: np.ndarray, golden: np.ndarray, logits: np.ndarray, settings: SamplingSettings, allowed: Tolerance
) -> str:
    """Say whether a golden differs from us in nothing but tokens that its running sum put on the other side of top-p.

    Ours sums in float64, so that it must have the very tokens of the true sum. No other filter has an edge that
    rounding moves so far. The sentence is empty when the difference is more than that.
    """
    both, one = (ours > 0) & (golden > 0), (ours > 0) != (golden > 0)
    only_top_p = SamplingSettings(temperature=settings.temperature, top_p=settings.top_p)
    if golden.dtype != np.float32 or settings != only_top_p or not one.any() or not both.any():
        return ""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / settings.temperature)
    order = np.argsort(-logits, kind="stable")
    ahead = np.empty_like(weights)
    ahead[order] = np.cumsum(weights[order]) - weights[order]
    off = ahead / weights.sum() - settings.top_p  # a token stays while the mass of those ahead of it is below p
    moved = moved_past_p(logits.size)
    if np.any(one & ((np.abs(off) > moved) | ((ours > 0) != (off < 0)))):
        return ""
    shares = [np.where(both, p, 0) / p[both].sum(dtype=np.float64) for p in (ours, golden)]
    if not measure(shares[0], shares[1]).within(allowed):
        return ""
    return f"{int(one.sum())} tokens within {np.abs(off[one]).max():.1e} of the top-p limit, rounding {moved:.1e}"
