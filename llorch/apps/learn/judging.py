"""Interface of a lesson's check: it yields comparisons with their arrays, and mistakes that explain failures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import Lesson
from llorch.judging.compare import judge
from llorch.judging.types import Cause, Comparison, Expectation

Mode = Literal["isolated", "chained"]


PartComparison = tuple[str, Comparison]  # the part that alone was in place, empty where several were


class Check(Protocol):
    """How the lessons of a kind are judged: of the forward pass, after the logits, of quantised files, of training."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """Yield every comparison, with the learner's parts in place: those of the lesson, or all so far."""
        ...

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """Name the known mistakes that explain the failed comparisons; empty if none does.

        The first cause gives the diagnosis its name. Causes that cannot be told apart from the first follow, then
        near misses. A cause of kind `rounding` is no mistake and has no `stages`; if the first is one, the lesson is
        passed.
        """
        ...


def judge_with_arrays(expectation: Expectation, actual: np.ndarray | None, *, model: str, backend: str) -> Comparison:
    """Compare an array of a learner with its expectation; the comparison holds both, because they are shown later."""
    comparison = judge(expectation, actual, model=model, backend=backend)
    return replace(comparison, expectation=expectation, actual=actual)
