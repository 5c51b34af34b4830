"""Hypotheses about the cause of an error, and the error that remains after they are injected into llorch's run."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from llorch.judging.types import Cause, CauseKind

# Change of a forward pass (`replay.Change`) or of a training step (`training.replay`).
RunChange = TypeVar("RunChange")
Kind = Literal["mistake", "setting", "rounding"]
EXPLAINS = 0.9  # smallest share of the error that a named hypothesis explains
EXPLAINS_ROUNDED = 0.7  # smallest share for one that rounds: llorch may round values near a tie the other way
NAMED = 4.0  # largest remaining error, in tolerances (derived from the right numbers, not from the wrong ones)
NEAR_MISS, N_NEAR_MISSES = 0.5, 3  # smallest share of the error that a near miss explains, and number of them listed
ORDER = {"mistake": 0, "setting": 1, "rounding": 2}  # preference if all explain an error, and order of injection


@dataclass(frozen=True)
class Hypothesis(Generic[RunChange]):
    """Possible deviation of an engine, with its value if it has one."""

    name: str  # in reports
    kind: Kind  # mistake, setting with a value, or `rounding`: a difference that the arithmetic explains
    stages: tuple[str, ...]  # names of the stages that it changes
    sentence: str  # the deviation and the right way
    change: RunChange  # injects it into a run; for a forward pass, a function from stage keys to the change
    value: str = ""  # of the setting, as text
    after_cached: bool = False  # shows only in a pass that continues a cache
    rounds: bool = False  # rounds to few bits
    by_place: bool = True  # an engine may deviate so in some stages or layers only
    in_layers: Callable[[int], bool] = lambda layer: True  # True for a layer in which an engine may deviate so

    def select_keys(self, stage_keys: Sequence[str]) -> tuple[str, ...]:
        """Select the stage keys that the hypothesis can change, such as `l0.q_rope` or `logits`."""
        return tuple(stage_key for stage_key in stage_keys if self._can_change(*stage_key.rpartition(".")[::2]))

    def _can_change(self, layer: str, stage: str) -> bool:
        return stage in self.stages and (not layer or self.in_layers(int(layer.removeprefix("l"))))


@dataclass(frozen=True)
class SettingFamily(Generic[RunChange]):
    """Hypotheses about one setting, one for each value."""

    name: str  # in reports
    stages: tuple[str, ...]  # names of the stages that read it
    values: Sequence[float]  # values to try first
    hypothesis: Callable[[float], Hypothesis[RunChange]]  # makes the hypothesis for a value
    refined: bool = False  # search between these values too, on a logarithmic scale
    later: bool = False  # may show in a later pass only
    largest: float = math.inf  # largest valid value


@dataclass(frozen=True)
class Attempt(Generic[RunChange]):
    """Hypotheses injected together, and the error that remains."""

    hypotheses: tuple[Hypothesis[RunChange], ...]  # one or two
    stages: tuple[str, ...]  # keys of the stages in which they were injected
    explained_share: float  # share of the error that they explain
    remaining: float  # the remaining error, as a multiple of the tolerance
    before: int | None = None  # number of a pass: only the passes before it are changed; None: all passes

    @property
    def is_named(self) -> bool:
        """True if they explain enough of the error, and the remaining error is rounding."""
        if all(hypothesis.rounds for hypothesis in self.hypotheses):
            return self.explained_share >= EXPLAINS_ROUNDED
        return self.explained_share >= EXPLAINS and self.remaining <= NAMED

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, the best attempt first; ties prefer mistakes to settings and few stages to many."""
        kinds = max(ORDER[hypothesis.kind] for hypothesis in self.hypotheses) if self.is_named else 0
        return not self.is_named, len(self.hypotheses), kinds, round(self.remaining, 1), len(self.stages)

    @property
    def names(self) -> frozenset[str]:
        """Names of the hypotheses."""
        return frozenset(hypothesis.name for hypothesis in self.hypotheses)

    @property
    def finding_kind(self) -> Literal["mistake", "rounding"]:
        """Kind of a finding with these causes; a setting with another value is a mistake, too."""
        return "rounding" if all(hypothesis.kind == "rounding" for hypothesis in self.hypotheses) else "mistake"

    def causes(self, kind: CauseKind | None = None) -> tuple[Cause, ...]:
        """Return a cause for each hypothesis; `kind` replaces the kind of the hypothesis."""
        scope = "" if self.before is None else f"In the passes before pass {self.before} only: "
        return tuple(
            Cause(
                hypothesis.name, kind or hypothesis.kind, f"{scope}{hypothesis.sentence}",
                hypothesis.select_keys(self.stages) or self.stages,  # quantities of a training step are no stage keys
                self.explained_share, self.remaining, hypothesis.value,
            )
            for hypothesis in self.hypotheses
        )  # fmt: skip


def best_by_name(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Keep the first attempt of each combination of names; `attempts` are in order, the best first."""
    best: dict[frozenset[str], Attempt] = {}
    for attempt in attempts:
        best.setdefault(attempt.names, attempt)
    return list(best.values())


def near_misses(attempts: Iterable[Attempt]) -> list[Attempt]:
    """List the near misses that explain most, each name once; `attempts` are in order, the best first."""
    near = best_by_name(attempt for attempt in attempts if attempt.explained_share >= NEAR_MISS)
    return sorted(near, key=lambda attempt: -attempt.explained_share)[:N_NEAR_MISSES]
