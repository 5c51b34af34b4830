"""Greedy tokens and top-p sets, which may differ from a golden where rounding decides (validation points 10 to 12)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from llorch.judging.compare import as_tie, compare_exact
from llorch.judging.runners import Runner
from llorch.judging.tolerances.forward import Margins, top_p_error
from llorch.judging.types import Comparison
from llorch.ops.sampling import SamplingSettings
from llorch.stages.comparison import Tolerance, measure
from llorch.stages.stage_ref import StageRef


class GreedyJudge:
    """Comparison of one runner's greedy tokens: a TIE if they differ from the golden only at near-ties of logits."""

    def __init__(self, model: str, runner: Runner, prompt: Sequence[int], margins: Margins) -> None:
        """Prepare a comparison of the runner's continuation of a prompt, with the margins of near-ties."""
        self._model, self._runner, self._prompt, self._margins = model, runner, prompt, margins

    def text(self, generated: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate llorch's next `n_tokens` after the prompt and the tokens of `generated`."""
        return self._runner.text((*self._prompt, *generated), n_tokens)

    def comparison(
        self, checkpoint: str, stage: str, engine: str, actual: np.ndarray, expected: np.ndarray
    ) -> Comparison:
        """Compare the token ids of a text, or its first token."""
        difference = measure(actual, expected)
        comparison = compare_exact(
            StageRef(checkpoint, stage), engine, difference.error, difference.fault or "",
            model=self._model, backend=self._runner.name,
        )  # fmt: skip
        notes: list[str] = []
        for index, token in self._departures(actual, expected) if difference.fault is None else ():
            gap, moved = self._margins.of(expected, index, token)
            notes.append(
                f"token {index}: expected {expected[index]}, got {token}, float64 gap {gap:.1e}, rounding {moved:.1e}"
            )
            if not gap <= moved:  # `not`, so that a NaN is an error
                return replace(comparison, note=notes[-1])
        return as_tie(comparison, "; ".join(notes)) if notes else comparison

    def _departures(self, actual: np.ndarray, expected: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield index and llorch's token where the texts differ; llorch then continues from the golden's token."""
        start = 0
        while start < len(expected):
            pairs = enumerate(zip_longest(actual.tolist(), expected[start:].tolist(), fillvalue=-1))
            first = next(((i, actual_id) for i, (actual_id, expected_id) in pairs if actual_id != expected_id), None)
            if first is None:
                return
            yield start + first[0], first[1]
            start += first[0] + 1
            actual = self.text(expected[:start].tolist(), len(expected) - start) if start < len(expected) else actual


def edge_of_top_p(
    actual: np.ndarray, golden: np.ndarray, logits: np.ndarray, settings: SamplingSettings, tolerance: Tolerance
) -> str:
    """Return a note if a golden differs from llorch only in tokens that rounding moves across the top-p limit.

    llorch sums in float64, so it must keep exactly the tokens of the exact sum. No other filter has a limit that
    rounding moves so far, so settings with other filters get no note. The note is empty if there are other differences.
    """
    in_both, in_one = (actual > 0) & (golden > 0), (actual > 0) != (golden > 0)
    only_top_p = SamplingSettings(temperature=settings.temperature, top_p=settings.top_p)
    if golden.dtype != np.float32 or settings != only_top_p or not in_one.any() or not in_both.any():
        return ""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / settings.temperature)
    order = np.argsort(-logits, kind="stable")
    mass_before = np.empty_like(weights)
    mass_before[order] = np.cumsum(weights[order]) - weights[order]
    gap = mass_before / weights.sum() - settings.top_p  # top-p keeps a token if the mass of likelier ones is below p
    moved = top_p_error(logits.size)
    if np.any(in_one & ((np.abs(gap) > moved) | ((actual > 0) != (gap < 0)))):
        return ""
    shares = [np.where(in_both, p, 0) / p[in_both].sum(dtype=np.float64) for p in (actual, golden)]
    if not measure(shares[0], shares[1]).within(tolerance):
        return ""
    return f"{int(in_one.sum())} tokens within {np.abs(gap[in_one]).max():.1e} of the top-p limit, rounding {moved:.1e}"
