"""Hypotheses about the cause of an error, and what is left of the error when they are injected."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from llorch.judging.types import Cause, CauseKind

# of a run of the forward pass, see `replay`; of a training step, see `training/replay`
RunChange = TypeVar("RunChange")
Kind = Literal["mistake", "setting", "rounding"]
EXPLAINS = 0.9  # the share of the error that a named hypothesis explains at least
EXPLAINS_ROUNDED = 0.7  # where it rounds to few bits: the rest are values between two of them that fell otherwise
NAMED = 4.0  # times its tolerance that a named one may leave: it is that of the right numbers, not of the wrong ones
NEAR_MISS = 0.5  # share of the error; what explains less is no cause
ORDER = {"mistake": 0, "setting": 1, "rounding": 2}


@dataclass(frozen=True)
class Hypothesis(Generic[RunChange]):
    """Possible deviation of an engine, with its value if it has one.

    Attributes:
        name: As reports call it.
        kind: Mistake, setting with a value, or difference that the arithmetic explains.
        stages: Names of the stages where it strikes.
        sentence: The deviation and the right way.
        change: The change of a run that injects it; of a forward pass, a function of the places.
        value: Recovered value, empty if there is none.
        after_cached: It shows only in a pass that continues a cache.
        rounds: It rounds to few bits.
        by_place: It can have been made in some stages or layers only.
        in_layers: Tells if it can have been made in a layer.
    """

    name: str
    kind: Kind
    stages: tuple[str, ...]
    sentence: str
    change: RunChange
    value: str = ""
    after_cached: bool = False
    rounds: bool = False
    by_place: bool = True
    in_layers: Callable[[int], bool] = lambda layer: True

    def at(self, places: Sequence[str]) -> tuple[str, ...]:
        """Select the places where the hypothesis can be made."""
        return tuple(place for place in places if self._strikes(*place.rpartition(".")[::2]))

    def _strikes(self, layer: str, stage: str) -> bool:
        return stage in self.stages and (not layer or self.in_layers(int(layer.removeprefix("l"))))


@dataclass(frozen=True)
class SettingFamily(Generic[RunChange]):
    """A setting with any value.

    Attributes:
        name: As reports call it.
        stages: Names of the stages that read it.
        values: The values to try first.
        hypothesis: Makes the hypothesis with a value.
        refined: Values between them are tried too, on a logarithmic scale.
        later: It may show in a later pass only.
        most: Largest value that has a meaning.
    """

    name: str
    stages: tuple[str, ...]
    values: Sequence[float]
    hypothesis: Callable[[float], Hypothesis[RunChange]]
    refined: bool = False
    later: bool = False
    most: float = math.inf


@dataclass(frozen=True)
class Attempt(Generic[RunChange]):
    """Hypotheses injected together, and what they leave of an error.

    Attributes:
        hypotheses: One or two.
        stages: Keys of the stages in which they were injected.
        explained_share: Share of the error that they explain.
        remaining: The remaining error, as a multiple of the tolerance.
    """

    hypotheses: tuple[Hypothesis[RunChange], ...]
    stages: tuple[str, ...]
    explained_share: float
    remaining: float

    @property
    def is_named(self) -> bool:
        """True if nothing is left but rounding."""
        if all(hypothesis.rounds for hypothesis in self.hypotheses):
            return self.explained_share >= EXPLAINS_ROUNDED
        return self.explained_share >= EXPLAINS and self.remaining <= NAMED

    @property
    def rank(self) -> tuple[float, ...]:
        """The better comes first: of equals mistakes before settings, few stages before many."""
        kinds = max(ORDER[hypothesis.kind] for hypothesis in self.hypotheses) if self.is_named else 0
        return not self.is_named, len(self.hypotheses), kinds, round(self.remaining, 1), len(self.stages)

    @property
    def names(self) -> frozenset[str]:
        """Names of the hypotheses."""
        return frozenset(hypothesis.name for hypothesis in self.hypotheses)

    @property
    def finding_kind(self) -> Literal["mistake", "rounding"]:
        """Kind of the finding that these hypotheses explain."""
        return "rounding" if all(hypothesis.kind == "rounding" for hypothesis in self.hypotheses) else "mistake"

    def causes(self, kind: CauseKind | None = None) -> tuple[Cause, ...]:
        """Return a cause for each hypothesis, of its own kind or of the given one."""
        return tuple(
            Cause(
                hypothesis.name, kind or hypothesis.kind, hypothesis.sentence,
                hypothesis.at(self.stages) or self.stages,  # quantities of a training step are no stages of the table
                self.explained_share, self.remaining, hypothesis.value,
            )
            for hypothesis in self.hypotheses
        )  # fmt: skip
