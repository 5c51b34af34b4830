"""Interface of a lesson's check: it yields comparisons with their arrays, and causes that explain failures."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import Lesson
from llorch.judging.compare import judge
from llorch.judging.types import Cause, Comparison, Expectation

Mode = Literal["isolated", "chained"]  # inputs of a stage: the golden's arrays, or results of earlier stages


NamedComparison = tuple[str, Comparison]  # (name of the only installed exercise, or "" for several; comparison)


class Check(ABC):
    """Check of the lessons of one kind: forward pass, after the logits, quantised files or training."""

    @abstractmethod
    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """Yield every comparison, with the learner's functions installed: the lesson's, or if chained all so far."""

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """Name causes of failed comparisons that no single call of a function shows; empty if there are none.

        The first cause names the diagnosis. Equally good causes follow. A cause of kind `rounding` is no mistake and
        has no `stages`; if it comes first, the lesson passes.
        """
        return ()


def judge_with_arrays(expectation: Expectation, actual: np.ndarray | None, *, model: str, backend: str) -> Comparison:
    """Compare a learner's array with its expectation; the comparison holds both, because the verdict prints them."""
    comparison = judge(expectation, actual, model=model, backend=backend)
    return replace(comparison, expectation=expectation, actual=actual)
