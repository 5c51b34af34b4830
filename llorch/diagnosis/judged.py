"""Every stage of a dump compared with llorch's: local error, inherited error, and the tolerance of a right engine."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llorch.comparison import Difference, measure
from llorch.diagnosis.earlier_passes import first_past, first_variances, unknown_stages
from llorch.diagnosis.expected import EngineArithmetic, Expectations, Expected, rows
from llorch.diagnosis.profile import profile
from llorch.diagnosis.replay import EMBED, Arrays, Past, Replay
from llorch.diagnosis.verdict import HONEST, RIGHT, WRONG, StageResult
from llorch.dumps.stage_dump import Seen
from llorch.places import token_axis
from llorch.verify.expert_selection import ExpertSelection

Say = Callable[[str], None]
_UNKNOWN = Difference(math.nan, math.nan)


@dataclass(frozen=True)
class Beside:
    """Array of the engine, and llorch's."""

    theirs: np.ndarray
    ours: np.ndarray
    masked: bool
    token_axis: int | None

    @property
    def difference(self) -> Difference:
        """Difference between the engine's array and llorch's, for each token too."""
        return measure(self.theirs, self.ours, masked=self.masked, token_axis=self.token_axis)

    @property
    def sizes(self) -> np.ndarray | None:
        """Norm of each token's row in llorch's array, by which the error of the row is measured."""
        if self.token_axis is None:
            return None
        others = tuple(axis for axis in range(self.ours.ndim) if axis != self.token_axis)
        return np.sqrt(np.square(np.where(np.isfinite(self.ours), self.ours, 0)).sum(axis=others))

    @property
    def has_numbers(self) -> bool:
        """Tell if both arrays are finite somewhere. Two arrays of NaN alone are equal whatever the cause."""
        if self.theirs.shape != self.ours.shape:
            return True
        return bool((np.isfinite(self.theirs) & np.isfinite(self.ours)).any())

    def where_finite(self) -> "Beside":
        """Set entries to 0 where both arrays are not finite: a mistake may produce just such values."""
        if self.masked or self.theirs.shape != self.ours.shape:
            return self
        nothing = ~np.isfinite(self.theirs) & ~np.isfinite(self.ours)
        return replace(self, theirs=np.where(nothing, 0, self.theirs), ours=np.where(nothing, 0, self.ours))


def beside(
    replay: Replay, seen: Seen, name: str, ours: np.ndarray, chosen_by: tuple[np.ndarray, np.ndarray] | None = None
) -> Beside:
    """Pair a dumped stage with the same tokens of llorch's; scores and variances tell the ties of a choice."""
    stage, _ = replay.stages[name]
    theirs, ours = seen.read().astype(ours.dtype), rows(ours, stage, seen)
    if chosen_by is not None:
        theirs = ExpertSelection(ours, *(rows(array, stage, seen) for array in chosen_by)).settled(theirs)
    if stage.is_choice:  # their order says nothing
        theirs, ours = np.sort(theirs, axis=-1), np.sort(ours, axis=-1)
    return Beside(theirs, ours, stage.masked, token_axis(stage))


class DumpJudge:
    """Judges the passes of a dump, one after the other; keeps what the caches held before each, in both ways."""

    def __init__(self, replay: Replay, say: Say = lambda line: None) -> None:
        """Prepare; nothing is computed yet."""
        self.replay, self.pasts = replay, list[tuple[Past, ...]]()
        self.not_run: list[tuple[int, str]] = []  # pass and stage key of what the dump cannot be judged by
        self._say, self._engine = say, EngineArithmetic(replay.dump)

    def results(self) -> Iterator[StageResult]:
        """Yield every stage of every pass, in the order of the run."""
        pasts = [first_past(self.replay), first_past(self.replay, as_given=False)]
        alone, held = first_past(self.replay), (first_variances(self.replay, pasts[0]), dict[str, np.ndarray]())
        unknown = zip(unknown_stages(self.replay), unknown_stages(self.replay, fed=False), strict=True)
        for n_pass, (here, in_own_run) in enumerate(unknown):
            self.pasts.append(tuple(pasts))
            for result in self._of_pass(n_pass, pasts, alone, held):
                if result.key in here:
                    self.not_run.append((n_pass, result.key))
                else:
                    yield replace(result, total=_UNKNOWN) if result.key in in_own_run else result
            pasts, alone = [past.next() for past in pasts], alone.next()

    def _of_pass(
        self, n_pass: int, pasts: Sequence[Past], alone: Past, held: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    ) -> Iterator[StageResult]:
        """Yield the results of one pass, part by part of the model."""
        expected = Expectations(self.replay, n_pass, self._engine, *held)
        xs, x_alone = [np.empty(0) for _ in pasts], np.empty(0)
        for part in range(EMBED, self.replay.config.n_layers + 1):
            self._say(f"pass {n_pass + 1} of {len(self.replay.dump.passes)}, {self._part(part)}")
            made, own = [dict[str, np.ndarray]() for _ in pasts], dict[str, np.ndarray]()
            runs = list(zip(xs, made, pasts, strict=True))
            passed = [self._run(n_pass, part, *run, engine_fed=True) for run in runs]
            own_passed = self._run(n_pass, part, x_alone, own, alone, engine_fed=False)
            for name, allowed in expected.of_part(part, made[0], passed[0]):
                seen = self.replay.dump.seen.get((n_pass, name))
                if seen is not None:
                    chosen_by = [expected.chosen_by(name, each) for each in passed]
                    arrays = [each[name] for each in made], own[name], chosen_by
                    yield self._result(n_pass, name, *arrays, allowed(seen))
            if part < self.replay.config.n_layers:
                behind = self.replay.input_of(part + 1)
                xs, x_alone = [each[behind] for each in passed], own_passed[behind]

    def _part(self, part: int) -> str:
        n_layers = self.replay.config.n_layers
        return f"layer {part + 1} of {n_layers}" if 0 <= part < n_layers else "outside the layers"

    def _run(
        self, n_pass: int, part: int, x: np.ndarray, made: dict[str, np.ndarray], past: Past, *, engine_fed: bool
    ) -> Arrays:
        with np.errstate(all="ignore"):  # an engine's own numbers may lead anywhere
            return self.replay.run(n_pass, made.__setitem__, past, first=part, last=part, x=x, fed=engine_fed)

    def _result(
        self, n_pass: int, name: str, ours: Sequence[np.ndarray], own: np.ndarray, chosen_by: Sequence[Any],
        allowed: Expected,
    ) -> StageResult:  # fmt: skip
        """Judge a stage with the cache that is nearer to what the engine did."""
        stage, layer = self.replay.stages[name]
        seen, judged = self.replay.dump.seen[n_pass, name], self._engine.judged(n_pass, name)
        pairs = [beside(self.replay, seen, name, *each) for each in zip(ours, chosen_by, strict=True)]
        found = [(here if np.isfinite(here.ours).all() else here.where_finite()).difference for here in pairs]
        local, here = min(zip(found, pairs, strict=True), key=lambda pair: pair[0].over(allowed.local))
        wrong = not local.within(allowed.local)
        return StageResult(
            n_pass=n_pass,
            key=name,
            stage=stage.name,
            layer=layer,
            name=seen.name,
            local=local,
            limit=allowed.local,
            total=beside(self.replay, seen, name, own).difference,
            total_limit=allowed.total,
            arithmetic=judged.name or "float32",
            verdict=WRONG if wrong else HONEST if judged.name else RIGHT,
            since=self.replay.since(n_pass, name),
            profile=profile(here.theirs, here.ours, stage, self.replay.config)
            if wrong and not local.fault and not stage.is_choice
            else None,
        )
