"""Checks of lessons 09 to 12: the steps after the logits, in all built-in models, compared with both engines.

A known mistake of the loop explains a wrong text if it generates the same tokens.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, exercises_so_far, list_written, suite_of
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Check, Mode, NamedComparison, judge_with_arrays
from llorch.apps.learn.lessons import Lesson
from llorch.diagnosis.mistakes import GENERATION, GenerationInputs, Mistake
from llorch.judging.compare import compare_exact
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.tokens import edge_of_top_p
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners.numpy import NumpyRunner
from llorch.judging.types import Cause, Comparison, Expectation
from llorch.ops import sampling
from llorch.runtime.builtin import BUILTIN, models_with_goldens
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


class AfterLogitsCheck(Check):
    """Check of one step after the logits, see `Check`."""

    @abstractmethod
    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Yield all comparisons of one model."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        for exercises in group_exercises(lesson, implementation, mode):
            yield from (("", comparison) for comparison in self._judge_group(implementation, exercises, mode))

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


class RowCheck(AfterLogitsCheck):
    """Check of lesson 09: the logits of the last row."""

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the logits after the prompt `near`, the goldens' input that starts at position 0."""
        with model.installed():
            row = model.runner.last_row(model.suite.cases["near"])
        for engine in model.engines:
            yield model.compare(model.suite.selected(model.runner, engine), row)


class ArgmaxCheck(AfterLogitsCheck):
    """Check of lesson 10: the argmax of each engine's row (chained: of the learner's row), and of a row with a tie.

    The tie has the largest logit three times. Both engines then take the lowest id.
    """

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


def make_tie(row: np.ndarray) -> np.ndarray:
    """Copy the largest logit of a row to two later indices: the last one, and the seventh before it."""
    best = int(np.argmax(row))
    row = row.copy()
    row[best + 1 :][::-7][:2] = row[best]
    return row


class FilterCheck(AfterLogitsCheck):
    """Check of lesson 11: the distribution after all filters."""

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the distributions of all `SAMPLINGS` on the same logits."""
        with model.installed():
            probabilities: Mapping[str, np.ndarray] = model.runner.probabilities(*model.suite.sampler_inputs())
        for engine in model.engines:
            for name, actual in probabilities.items():
                expectation = model.suite.distribution(model.runner, engine, name)
                comparison = RunnerCheck(model.suite, model.runner).distribution_row(expectation, actual)
                yield replace(comparison, expectation=expectation, actual=actual)

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """Return rounding as the cause if only tokens at top-p's edge differ."""
        edges = [_describe_edge(comparison) for _, comparison in wrong]
        return [Cause("edge-of-top-p", "rounding", edges[0], (), 1.0, 0.0)] if all(edges) else []


def _describe_edge(wrong: Comparison) -> str:
    """Describe the tokens that rounding moves over the edge of top-p if only those differ; else return ""."""
    expectation, name = wrong.expectation, wrong.stage_ref.part
    if expectation is None or wrong.actual is None:
        return ""
    logits, _ = suite_of(wrong.model).sampler_inputs()
    return edge_of_top_p(expectation.expected, wrong.actual, logits, SAMPLINGS[name], expectation.tolerance)


class GenerationCheck(AfterLogitsCheck):
    """Check of lesson 12: greedy generation."""

    def compare_model(self, model: AfterLogitsModel) -> Iterator[Comparison]:
        """Compare the greedy tokens one by one."""
        with model.installed():
            text = model.runner.text(model.suite.prompt, model.suite.n_greedy(model.runner))
        for engine, golden in model.engines.items():
            comparison = model.suite.tokens(model.runner).comparison("12", "generation", engine, text, golden.greedy)
            yield replace(comparison, actual=text)

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """Return the known mistakes of the loop that generate every wrong text."""
        inputs = [_read_inputs(comparison) for _, comparison in wrong]
        return [
            Cause(mistake.name, "mistake", mistake.diagnosis, mistake.stages, 1.0, 0.0)
            for mistake in GENERATION
            if all(
                any(np.array_equal(comparison.actual, variant(x, "generation")) for variant in _variants(mistake))
                for (_, comparison), x in zip(wrong, inputs, strict=True)
                if comparison.actual is not None
            )
        ]


def _variants(mistake: Mistake[GenerationInputs]) -> Sequence[Callable[[GenerationInputs, str], np.ndarray]]:
    return mistake.result, *mistake.also


def _read_inputs(wrong: Comparison) -> GenerationInputs:
    """Return the weights, the prompt and the number of tokens of a wrong text."""
    suite = suite_of(wrong.model)
    return GenerationInputs(suite.weights, tuple(suite.prompt), len(suite.engine_outputs[wrong.engine].greedy))
