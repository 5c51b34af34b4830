"""Checks of lessons 09 to 12: the steps after the logits, in all built-in models, compared with both engines.

A known mistake explains a failure if, on the same inputs, it reproduces every wrong result within the tolerance.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, exercises_so_far, list_written, suite_of
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Mode, NamedComparison, judge_with_arrays
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
from llorch.runtime.builtin import BUILTIN, models_with_goldens
from llorch.runtime.errors import LearnerFault
from llorch.stages.comparison import EXACT, FAIL, measure
from llorch.stages.stage_ref import StageRef


class AfterLogitsModel:
    """A built-in model, and the learner's functions to install in it."""

    def __init__(self, model: str, implementation: Implementation, group: Sequence[Exercise], *, chained: bool) -> None:
        """Load a built-in model; `installed()` puts the learner's `group` of functions in place."""
        self.suite: ForwardExpectations = suite_of(model)
        self.runner, self.chained = NumpyRunner(self.suite.weights, BACKEND), chained
        self.engines = self.suite.engines(self.runner)
        self.installed = lambda: implementation.installed(group)

    def compare(self, expectation: Expectation, actual: np.ndarray) -> Comparison:
        """Compare an array with its expectation."""
        return judge_with_arrays(expectation, actual, model=self.suite.model, backend=BACKEND)


class AfterLogitsCheck(ABC):
    """Check of one step after the logits, see `Check`."""

    stage: ClassVar[str]  # name of the step after the logits

    @abstractmethod
    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Yield all comparisons of one model."""

    @abstractmethod
    def read_inputs(self, wrong: Comparison) -> Any:
        """Return the inputs of a wrong result, in the form that the mistakes of `llorch.diagnosis.mistakes` take."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        for exercises in group_exercises(lesson, implementation, mode):
            yield from (("", comparison) for comparison in self._judge_group(implementation, exercises, mode))

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """See `Check`; each exercise is searched separately, because each may have a different mistake."""
        causes: dict[str, Cause] = {}
        for exercises in group_exercises(lesson, implementation, mode) if wrong else ():
            failed = []
            with suppress(LearnerFault):  # raised in a later model: earlier comparisons may still have a cause
                failed.extend(c for c in self._judge_group(implementation, exercises, mode) if c.verdict == FAIL)
            causes |= {cause.name: cause for cause in (self.explain(failed) if failed else ())}
        return list(causes.values())

    def explain(self, wrong: Sequence[Comparison]) -> Iterator[Cause]:
        """Yield the known mistakes that reproduce every wrong result."""
        mistakes: Sequence[Mistake[Any]] = [m for m in (*SAMPLING, *GENERATION) if self.stage in m.stages]
        all_inputs = [self.read_inputs(comparison) for comparison in wrong]
        for mistake in mistakes:
            variants = (mistake.result, *mistake.also)
            errors = (
                min(_remaining_error(c, variant(x, self.stage)) for variant in variants)
                for c, x in zip(wrong, all_inputs, strict=True)
            )
            if (worst := _worst_within(errors)) is not None:
                yield Cause(mistake.name, "mistake", mistake.diagnosis, mistake.stages, 1.0, worst)

    def _judge_group(
        self, implementation: Implementation, exercises: Sequence[Exercise], mode: Mode
    ) -> Iterator[Comparison]:
        """Judge exercises of an implementation on every built-in model that is on this machine."""
        for model in models_with_goldens(BUILTIN):
            yield from self.compare_model(AfterLogitsModel(model, implementation, exercises, chained=mode == "chained"))


def group_exercises(lesson: Lesson, implementation: Implementation, mode: Mode) -> list[list[Exercise]]:
    """Group the exercises to install together: each of the lesson alone, or all so far in chained mode."""
    written = list_written(lesson, implementation)
    if mode == "chained":
        return [exercises_so_far(lesson, implementation)] if written else []
    return [[exercise] for exercise in written]


def _remaining_error(wrong: Comparison, array: np.ndarray) -> float:
    """Return the difference between the learner's array and a mistake's, as a multiple of the tolerance."""
    tolerance = wrong.expectation.tolerance if wrong.expectation else EXACT  # token ids have no expectation
    return measure(wrong.actual, array if wrong.actual is None else array.astype(wrong.actual.dtype)).over(tolerance)


def _worst_within(errors: Iterator[float]) -> float | None:
    """Return the largest error (in tolerances), or None as soon as one is NaN or above 1."""
    worst = 0.0
    for error in errors:
        if not error <= 1:
            return None
        worst = max(worst, error)
    return worst


class RowCheck(AfterLogitsCheck):
    """Check of lesson 09: the logits of the last row."""

    stage = "selected_logits"

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the logits after the prompt `near`, the goldens' input that starts at position 0."""
        with model.installed():
            row = model.runner.last_row(model.suite.cases["near"])
        for engine in model.engines:
            yield model.compare(model.suite.selected(model.runner, engine), row)

    def read_inputs(self, wrong: Comparison) -> SamplerInputs:
        """Return the logits of all positions."""
        near = suite_of(wrong.model).cases["near"]
        return SamplerInputs(run(suite_of(wrong.model).weights, near)["logits"], SAMPLINGS["all"], near.ids)


class ArgmaxCheck(AfterLogitsCheck):
    """Check of lesson 10: the argmax of each engine's row (chained: of the learner's row), and of a row with a tie.

    The tie has the largest logit three times. Both engines then take the lowest id.
    """

    stage = "argmax"

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the argmax with the golden's, where a near-tied id passes too; then that of the row with a tie."""
        for engine, golden in model.engines.items():
            with model.installed():
                row = model.runner.last_row(model.suite.cases["near"]) if model.chained else golden.selected_logits
                best, lowest = (np.asarray([sampling.greedy(x)]) for x in (row, make_tie(golden.selected_logits)))
            expected = np.asarray([int(np.argmax(golden.selected_logits))])
            comparison = model.suite.tokens(model.runner).comparison("10", "argmax", engine, best, expected)
            yield replace(comparison, actual=best)
            wrong = float(lowest[0] != expected[0])
            note = f"expected {expected[0]}, the lowest id among equal logits, got {lowest[0]}" if wrong else ""
            tie = StageRef("10", "argmax", case="tie")
            comparison = compare_exact(tie, engine, wrong, note, model=model.suite.model, backend=BACKEND)
            yield replace(comparison, actual=lowest)

    def read_inputs(self, wrong: Comparison) -> SamplerInputs:
        """Return the logits row of the case."""
        suite = suite_of(wrong.model)
        row = suite.engine_outputs[wrong.engine].selected_logits
        row = make_tie(row) if wrong.stage_ref.run == "tie" else row
        return SamplerInputs(row[None], SAMPLINGS["all"], suite.cases["near"].ids)


def make_tie(row: np.ndarray) -> np.ndarray:
    """Copy the largest logit of a row to two later indices: the last one, and the seventh before it."""
    best = int(np.argmax(row))
    row = row.copy()
    row[best + 1 :][::-7][:2] = row[best]
    return row


class FilterCheck(AfterLogitsCheck):
    """Check of lesson 11: the distribution after all filters."""

    stage = "probabilities"

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the distributions of all `SAMPLINGS` on the same logits."""
        with model.installed():
            probabilities: Mapping[str, np.ndarray] = model.runner.probabilities(*model.suite.sampler_inputs())
        for engine in model.engines:
            for name, actual in probabilities.items():
                expectation = model.suite.distribution(model.runner, engine, name)
                comparison = RunnerCheck(model.suite, model.runner).distribution_row(expectation, actual)
                yield replace(comparison, expectation=expectation, actual=actual)

    def read_inputs(self, wrong: Comparison) -> SamplerInputs:
        """Return the logits as the filters get them."""
        logits, history = suite_of(wrong.model).sampler_inputs()
        return SamplerInputs(logits[None].astype(np.float64), SAMPLINGS[wrong.stage_ref.part], history)

    def explain(self, wrong: Sequence[Comparison]) -> Iterator[Cause]:
        """Yield the known mistakes that explain the error; rounding first if only tokens at top-p's edge differ."""
        edges = [_describe_edge(comparison) for comparison in wrong]
        if all(edges):
            yield Cause("edge-of-top-p", "rounding", edges[0], (), 1.0, 0.0)
        yield from super().explain(wrong)


def _describe_edge(wrong: Comparison) -> str:
    """Describe the tokens that rounding moves over the edge of top-p if only those differ; else return ""."""
    expectation, name = wrong.expectation, wrong.stage_ref.part
    if expectation is None or wrong.actual is None:
        return ""
    logits, _ = suite_of(wrong.model).sampler_inputs()
    return edge_of_top_p(expectation.expected, wrong.actual, logits, SAMPLINGS[name], expectation.tolerance)


class GenerationCheck(AfterLogitsCheck):
    """Check of lesson 12: greedy generation."""

    stage = "generation"

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the greedy tokens one by one."""
        with model.installed():
            text = model.runner.text(model.suite.prompt, model.suite.n_greedy(model.runner))
        for engine, golden in model.engines.items():
            comparison = model.suite.tokens(model.runner).comparison("12", "generation", engine, text, golden.greedy)
            yield replace(comparison, actual=text)

    def read_inputs(self, wrong: Comparison) -> GenerationInputs:
        """Return the weights, the prompt and the number of tokens."""
        suite = suite_of(wrong.model)
        return GenerationInputs(suite.weights, tuple(suite.prompt), len(suite.engine_outputs[wrong.engine].greedy))
