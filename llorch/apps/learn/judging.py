"""What a check gives: rows of the judge, and the arrays behind them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import Lesson
from llorch.diagnosis.verdict import Suspect
from llorch.judging.judge import Comparison, Expectation

Mode = Literal["isolated", "chained"]


@dataclass(frozen=True)
class LessonComparison:
    """One comparison.

    Attributes:
        comparison: Its verdict.
        expectation: The expectation; None where things are equal or not.
        actual: What the learner's code made; None if it never came.
    """

    comparison: Comparison
    expectation: Expectation | None
    actual: np.ndarray | None


PartComparison = tuple[str, LessonComparison]  # the part that alone was in place, empty where several were


@dataclass(frozen=True)
class NearMiss(Suspect):
    """What explains much of an error, but not all of it: it is not the cause."""


class Check(Protocol):
    """How the lessons of a kind are judged: of the forward pass, after the logits, of quantised files, of training."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """Yield every comparison, with the learner's parts in place: those of the lesson, or all so far."""
        ...

    def suspects(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Suspect]:
        """Name the known mistakes that explain the failed comparisons; empty if none does.

        The first suspect gives the diagnosis its name. Suspects that cannot be told apart from the first follow, then
        instances of `NearMiss`. A suspect of kind honest (arithmetic) is no mistake and has no `stages`; if the first
        is honest, the lesson is passed.
        """
        ...
