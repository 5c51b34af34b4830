"""Score of a mistake, or of a number moved until it fits: the share of a training dump's error that it explains."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.diagnosis.training.hypotheses import ScaledMistakes, TrainingHypothesis, unsaid
from llorch.diagnosis.training.judge import JudgedArray, TrainingJudge
from llorch.diagnosis.training.replay import InjectedMistake, ReplayedRun, TrainingReplay, Where
from llorch.stages.comparison import times_over

NEAR = 0.5  # share of the error from which on something may be its cause, or is near
AFTER_CLIPPING = "gradients-after-clipping"
_MOVES, _NUDGE, _FARTHEST = 12, 1e-4, 3.0  # of a logarithm that is looked for

Cure = tuple[InjectedMistake, ...]


@dataclass(frozen=True)
class Scored:
    """One or two hypotheses together: the share of the error that they explain, and by how much the rest is over."""

    cause: tuple[TrainingHypothesis, ...]
    share: float
    left: float

    @property
    def names(self) -> frozenset[str]:
        """Names of the hypotheses."""
        return frozenset(one.name for one in self.cause)

    @property
    def injected(self) -> Cure:
        """Changes that the cause makes."""
        return tuple(one.injected for one in self.cause)


class Scorer:
    """Scores for one wrong quantity, `wrong`, with what was named before planted already."""

    def __init__(self, replay: TrainingReplay, judge: TrainingJudge, wrong: Sequence[JudgedArray], cure: Cure) -> None:
        """Prepare."""
        self.replay, self.judge, self.wrong, self.cure = replay, judge, wrong, cure
        self.step = judge.steps[wrong[0].key[0]]

    def best_first(self, causes: Iterable[tuple[TrainingHypothesis, ...]]) -> list[Scored]:
        """Keep the causes that explain some of the error; causes that explain all of it come first."""
        found = [self._scored(cause) for cause in causes]
        return sorted((one for one in found if one.share > 0), key=lambda one: (one.left > 1, -round(one.share, 6)))

    def chosen(self, scored: Sequence[Scored]) -> tuple[Scored | None, list[Scored]]:
        """Choose the cause that explains all of the error and makes most of the dump right; also return its equals."""
        explain = [one for one in scored if one.left <= 1 and one.share >= NEAR]
        counts = [self.n_right(one) for one in explain]
        if max(counts, default=-1) < 0:
            return None, []
        equal = [one for one, count in zip(explain, counts, strict=True) if count == max(counts)]
        return equal[0], list({one.names: one for one in equal if not one.names & equal[0].names}.values())[:3]

    def n_right(self, one: Scored) -> int:
        """Count the arrays of the whole dump that are right with a cause; -1 if its number fits this step alone."""
        rows, (step, group, _) = self.judge.rows(self.replay.run(self.cure + one.injected)), self.wrong[0].key
        others = any(row.over > 1 for row in rows if row.key[0] > step and row.key[1] == group)
        return -1 if others and any(h.value and not h.honest for h in one.cause) else sum(row.over <= 1 for row in rows)

    def fitted(self, family: ScaledMistakes, where: Where, norm: float) -> Iterator[TrainingHypothesis]:
        """Yield a setting with the value that fits best; nothing if the setting has no effect.

        `norm` is the norm of the gradients.
        """

        def inject(value: float) -> InjectedMistake:
            return InjectedMistake(family.make(value), where, along=True)

        value = self._fit(family.starts, inject)
        if value is None or value > family.most:
            return
        sentence, shown = family.said(value)
        if family.name == "loss-normalisation" and where == "back":
            yield self._scaled_gradients(inject(value), value, norm)
            return
        honest = unsaid(self.replay.dump, family)
        yield TrainingHypothesis(
            inject(value), family.name, sentence + (" The dump does not declare it." if honest else ""), shown, honest
        )

    def _scaled_gradients(self, injected: InjectedMistake, factor: float, norm: float) -> TrainingHypothesis:
        """Make the hypothesis that all gradients are a multiple of the right ones: clipped already, or scaled."""
        largest = self.replay.dump.settings.max_grad_norm
        if norm > largest and math.isclose(factor, largest / norm, rel_tol=1e-3):
            said = "These are the gradients after clipping; name them `clipped.`, or dump them before clipping."
            return TrainingHypothesis(injected, AFTER_CLIPPING, said, f"{factor:.6g}", honest=True)
        said = f"All gradients are {factor:.6g} times the gradients of the dumped loss."
        return TrainingHypothesis(injected, "gradient-scale", said, f"{factor:.6g}")

    def _run(self, injected: Cure) -> ReplayedRun:
        return self.replay.run(self.cure + injected, until=self.wrong[0].key)

    def _scored(self, cause: tuple[TrainingHypothesis, ...]) -> Scored:
        """Return the share of the error that a cause explains and the largest error left, in tolerances."""
        run, before, after, left = self._run(tuple(one.injected for one in cause)), 0.0, 0.0, 0.0
        for row in self.wrong:
            now = self.judge.difference(self.step, row.key[1], row.shown, run.arrays[row.key])
            before, after = before + min(row.difference.error, 1e9) ** 2, after + min(now.error, 1e9) ** 2
            left = max(left, now.over(row.tolerance))
        return Scored(cause, 1 - math.sqrt(times_over(after, before)), left)

    def _fit(self, starts: Sequence[float], inject: Callable[[float], InjectedMistake]) -> float | None:
        """Fit the number with the least distance to the dump, by Gauss's steps of its logarithm; None: no effect."""
        x = min(starts, key=lambda start: float(np.linalg.norm(self._off(inject(start)))))
        for _ in range(_MOVES):
            here = self._off(inject(x))
            slope = (self._off(inject(x * math.exp(_NUDGE))) - here) / _NUDGE
            steep = float(slope @ slope)
            if not (math.isfinite(steep) and steep > 1e-24):
                return None
            move = float(np.clip(-(slope @ here) / steep, -_FARTHEST, _FARTHEST))
            x *= math.exp(move)
            if abs(move) < 1e-7:
                break
        return x

    def _off(self, injected: InjectedMistake) -> np.ndarray:
        """Compute the errors of the quantity, each array divided by its norm in the dump; 0 if nothing is compared."""
        run, off = self._run((injected,)), []
        for row in self.wrong:
            actual, expected = row.shown.array, run.arrays[row.key]
            if row.shown.rows is not None:
                actual, expected = actual[row.shown.rows], expected[row.shown.rows]
            off.append(np.nan_to_num((expected - actual) / (np.linalg.norm(actual) or 1.0)).ravel())
        return np.concatenate(off)
