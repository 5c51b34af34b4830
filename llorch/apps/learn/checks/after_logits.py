"""Lessons 09 to 12: what sampling makes of the logits, in all built-in models, beside both engines.

The known mistakes are planted on the same inputs: one that makes exactly what was made, wherever that is wrong, names
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, parts_so_far, suite_of, written_parts
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Mode, PartComparison, judge_with_arrays
from llorch.apps.learn.lessons import Lesson
from llorch.diagnosis.mistakes import GENERATION, SAMPLING, GenerationInputs, Mistake, SamplerInputs
from llorch.judging.compare import compare_exact
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.tokens import edge_of_top_p
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners.numpy import NumpyRunner, run
from llorch.judging.types import Cause, Comparison, Expectation
from llorch.ops import sampling
from llorch.runtime.builtin import BUILTIN, held
from llorch.runtime.errors import LearnerFault
from llorch.stages.comparison import EXACT, FAIL, measure
from llorch.stages.stage_ref import StageRef


class AfterLogitsModel:
    """A built-in model with some parts of the learner in it."""

    def __init__(self, model: str, implementation: Implementation, parts: Sequence[Exercise], *, chained: bool) -> None:
        """Load a built-in model by name, with the learner's functions in place."""
        self.suite: ForwardExpectations = suite_of(model)
        self.runner, self.chained = NumpyRunner(self.suite.weights, BACKEND), chained
        self.engines = self.suite.engines(self.runner)
        self.installed = lambda: implementation.installed(parts)

    def compare(self, expectation: Expectation, actual: np.ndarray) -> Comparison:
        """Compare a result with its expectation, within a tolerance."""
        return judge_with_arrays(expectation, actual, model=self.suite.model, backend=BACKEND)


class AfterLogitsCheck(ABC):
    """See `Check`."""

    stage: ClassVar[str]  # the step after the logits

    @abstractmethod
    def of(self, here: AfterLogitsModel) -> Iterator[Comparison]:
        """Yield all comparisons of one model."""

    @abstractmethod
    def inputs(self, wrong: Comparison) -> Any:
        """Return the inputs of the wrong result, in the form that the library's mistakes read."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """See `Check`."""
        for parts in groups(lesson, implementation, mode):
            yield from (("", comparison) for comparison in self._judge_parts(implementation, parts, mode))

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """See `Check`; of every part by itself, as each may have a mistake of its own."""
        found: dict[str, Cause] = {}
        for parts in groups(lesson, implementation, mode) if wrong else ():
            here = []
            with suppress(LearnerFault):  # in a later model: what was judged before it has a name, too
                here.extend(each for each in self._judge_parts(implementation, parts, mode) if each.verdict == FAIL)
            found |= {cause.name: cause for cause in (self.named(here) if here else ())}
        return list(found.values())

    def named(self, wrong: Sequence[Comparison]) -> Iterator[Cause]:
        """Yield the known mistakes that explain all of the error."""
        known: Sequence[Mistake[Any]] = [each for each in (*SAMPLING, *GENERATION) if self.stage in each.stages]
        read = [self.inputs(each) for each in wrong]
        for mistake in known:
            ways = (mistake.result, *mistake.also)
            lefts = (min(_left(each, way(s, self.stage)) for way in ways) for each, s in zip(wrong, read, strict=True))
            if (worst := _worst_within(lefts)) is not None:
                yield Cause(mistake.name, "mistake", mistake.diagnosis, mistake.stages, 1.0, worst)

    def _judge_parts(
        self, implementation: Implementation, parts: Sequence[Exercise], mode: Mode
    ) -> Iterator[Comparison]:
        """Judge parts of an implementation on every built-in model that is on this machine."""
        for model in held(BUILTIN):
            yield from self.of(AfterLogitsModel(model, implementation, parts, chained=mode == "chained"))


def groups(lesson: Lesson, implementation: Implementation, mode: Mode) -> list[list[Exercise]]:
    """Return the exercises to install together: each one of the lesson alone, or all so far in chained mode."""
    written = written_parts(lesson, implementation)
    if mode == "chained":
        return [parts_so_far(lesson, implementation)] if written else []
    return [[exercise] for exercise in written]


def _left(wrong: Comparison, made: np.ndarray) -> float:
    """Return the difference between the learner's result and a mistake's, as a multiple of the tolerance."""
    tolerance = wrong.expectation.tolerance if wrong.expectation else EXACT  # ids
    return measure(wrong.actual, made if wrong.actual is None else made.astype(wrong.actual.dtype)).over(tolerance)


def _worst_within(lefts: Iterator[float]) -> float | None:
    """Return the largest number, or None as soon as one is NaN or above 1."""
    worst = 0.0
    for left in lefts:
        if not left <= 1:
            return None
        worst = max(worst, left)
    return worst


class RowCheck(AfterLogitsCheck):
    """Lesson 09."""

    stage = "selected_logits"

    def of(self, here: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the row after the prompt."""
        with here.installed():
            row = here.runner.last_row(here.suite.cases["near"])
        for engine in here.engines:
            yield here.compare(here.suite.selected(here.runner, engine), row)

    def inputs(self, wrong: Comparison) -> SamplerInputs:
        """Return the logits of all tokens."""
        near = suite_of(wrong.model).cases["near"]
        return SamplerInputs(run(suite_of(wrong.model).weights, near)["logits"], SAMPLINGS["all"], near.ids)


class ArgmaxCheck(AfterLogitsCheck):
    """Lesson 10: of each engine's row (chained: of the learner's own), and of that row with its largest number thrice.

    At such a tie both engines take the lowest id.
    """

    stage = "argmax"

    def of(self, here: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the argmax of a row with the golden, except at near-ties; of equal logits the lowest id is right."""
        for engine, golden in here.engines.items():
            with here.installed():
                row = here.runner.last_row(here.suite.cases["near"]) if here.chained else golden.selected_logits
                best, lowest = (np.asarray([sampling.greedy(each)]) for each in (row, tied_row(golden.selected_logits)))
            expected = np.asarray([int(np.argmax(golden.selected_logits))])
            comparison = here.suite.tokens(here.runner).comparison("10", "argmax", engine, best, expected)
            yield replace(comparison, actual=best)
            wrong = float(lowest[0] != expected[0])
            note = f"expected {expected[0]}, the lowest id among equal logits, got {lowest[0]}" if wrong else ""
            tie = StageRef("10", "argmax", case="tie")
            comparison = compare_exact(tie, engine, wrong, note, model=here.suite.model, backend=BACKEND)
            yield replace(comparison, actual=lowest)

    def inputs(self, wrong: Comparison) -> SamplerInputs:
        """Return the row of logits of the case."""
        suite = suite_of(wrong.model)
        row = suite.engine_outputs[wrong.engine].selected_logits
        row = tied_row(row) if wrong.stage_ref.run == "tie" else row
        return SamplerInputs(row[None], SAMPLINGS["all"], suite.cases["near"].ids)


def tied_row(row: np.ndarray) -> np.ndarray:
    """Copy the largest number of a row to two later places."""
    best = int(np.argmax(row))
    row = row.copy()
    row[best + 1 :][::-7][:2] = row[best]
    return row


class FilterCheck(AfterLogitsCheck):
    """Lesson 11."""

    stage = "probabilities"

    def of(self, here: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the result of every setting on the same logits."""
        with here.installed():
            made: Mapping[str, np.ndarray] = here.runner.probabilities(*here.suite.sampler_inputs())
        for engine in here.engines:
            for name, actual in made.items():
                expectation = here.suite.distribution(here.runner, engine, name)
                comparison = RunnerCheck(here.suite, here.runner).distribution_row(expectation, actual)
                yield replace(comparison, expectation=expectation, actual=actual)

    def inputs(self, wrong: Comparison) -> SamplerInputs:
        """Return the logits as the filters get them."""
        logits, history = suite_of(wrong.model).sampler_inputs()
        return SamplerInputs(logits[None].astype(np.float64), SAMPLINGS[wrong.stage_ref.part], history)

    def named(self, wrong: Sequence[Comparison]) -> Iterator[Cause]:
        """Yield the known mistakes; rounding comes first, if only tokens at the edge of top-p differ."""
        edges = [_edge(each) for each in wrong]
        if all(edges):
            yield Cause("edge-of-top-p", "rounding", f"not your bug: {edges[0]}", (), 1.0, 0.0)
        yield from super().named(wrong)


def _edge(wrong: Comparison) -> str:
    """Describe the tokens at the edge of top-p if only those differ, else ""."""
    expectation, name = wrong.expectation, wrong.stage_ref.part
    if expectation is None or wrong.actual is None:
        return ""
    logits, _ = suite_of(wrong.model).sampler_inputs()
    return edge_of_top_p(expectation.expected, wrong.actual, logits, SAMPLINGS[name], expectation.tolerance)


class GenerationCheck(AfterLogitsCheck):
    """Lesson 12."""

    stage = "generation"

    def of(self, here: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the greedy text, token by token."""
        with here.installed():
            text = here.runner.text(here.suite.prompt, here.suite.n_greedy(here.runner))
        for engine, golden in here.engines.items():
            comparison = here.suite.tokens(here.runner).comparison("12", "generation", engine, text, golden.greedy)
            yield replace(comparison, actual=text)

    def inputs(self, wrong: Comparison) -> GenerationInputs:
        """Return the weights, the prompt and the number of tokens."""
        suite = suite_of(wrong.model)
        return GenerationInputs(suite.weights, tuple(suite.prompt), len(suite.engine_outputs[wrong.engine].greedy))
