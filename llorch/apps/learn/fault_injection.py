"""Fault injection for lessons: a check must detect each known mistake when it is injected into a right solution.

In the forward pass each mistake of `llorch.diagnosis.mistakes` makes one stage of one layer wrong, while the learner's
functions compute the others. In other lessons a typed mistake (a wrong function, see `typed_mistakes`) replaces the
learner's function. A mistake is detected if it fails by ten times the tolerance and the diagnosis names it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.apps.learn.check import FORWARD, check
from llorch.apps.learn.checks.forward import ForwardModel, list_written, models_of
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import Lesson, typed_mistakes
from llorch.diagnosis.mistakes import STAGE_MISTAKES, Mistake
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, part_of_trace, stage_inputs
from llorch.diagnosis.mistakes.variants import VISIBLE, apply_mistake
from llorch.diagnosis.verdict import Finding
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME, key


@dataclass(frozen=True)
class InjectedFault:
    """One known mistake, injected into the run of a learner's solution.

    Attributes:
        mistake: Name of the mistake.
        stage: Stage that it was injected into, or exercise that it replaced.
        over: Error as a multiple of the tolerance; for a typed mistake infinity, or 0 if the check passes.
        named: Names of all causes that the diagnosis gives, also of equally good ones.
    """

    mistake: str
    stage: str
    over: float
    named: tuple[str, ...]

    @property
    def is_detected(self) -> bool:
        """True if the check detected the mistake and named it."""
        return self.over >= VISIBLE and self.mistake in self.named


@dataclass(frozen=True)
class FaultReport:
    """All injected faults of a lesson."""

    lesson: str
    faults: Sequence[InjectedFault]

    def __str__(self) -> str:
        """Format the number of detected faults, their total, and the names of those not detected."""
        missed = [fault for fault in self.faults if not fault.is_detected]
        lines = [
            f"checkpoint_{self.lesson}: {len(self.faults) - len(missed)} of {len(self.faults)} known mistakes detected"
        ]
        for fault in missed:
            diagnosis = f"taken for {fault.named[0]}" if fault.named else "not named"
            lines.append(f"  {fault.mistake} in {fault.stage}: {fault.over:.3g} times the tolerance, {diagnosis}")
        return "\n".join(lines)


def inject_faults(lesson: Lesson, implementation: Implementation) -> FaultReport:
    """Inject every known mistake of a lesson into a solution that passes."""
    faults = _inject_all(lesson, implementation) if lesson.number in FORWARD else _inject_typed(lesson, implementation)
    return FaultReport(lesson.number, list(faults))


def _inject_typed(lesson: Lesson, implementation: Implementation) -> Iterator[InjectedFault]:
    """Check the solution with each typed mistake in place of one exercise; yield one fault each."""
    for name, functions in typed_mistakes(lesson).items():
        for mistake, function in functions.items():
            report = check(lesson, Implementation(implementation.source, {**implementation.written, name: function}))
            cause_names = tuple(cause.name for cause in report.causes if cause.kind != "near miss")
            yield InjectedFault(mistake, name, math.inf if report.label == FAIL else 0.0, cause_names)


def _inject_all(lesson: Lesson, implementation: Implementation) -> Iterator[InjectedFault]:
    """Yield one fault for each mistake: the first detected in any exercise, model and case, else the largest."""
    exercises = list_written(lesson, implementation)
    models = [ForwardModel(model, [exercise], implementation) for exercise in exercises for model in models_of(lesson)]
    for mistake in STAGE_MISTAKES:
        attempts: list[InjectedFault] = []
        for fault in _check_mistake(mistake, models):
            attempts.append(fault)
            if fault.is_detected:
                break
        if attempts:
            yield max(attempts, key=lambda attempt: (attempt.is_detected, attempt.over))


def _check_mistake(mistake: Mistake[StageInputs], models: Sequence[ForwardModel]) -> Iterator[InjectedFault]:
    """Inject a mistake into the first visible stage of each model that it applies to; yield one fault for each case."""
    for model in models:
        computed = {stage for exercise in model.exercises for stage in exercise.stages} - model.hidden
        visible = [name for name in mistake.stages if name in computed]
        stages = [BY_NAME[name] for name in visible if BY_NAME[name].applies_to(model.config)]
        if not stages or not mistake.applies_to(model.config):
            continue
        stage = stages[0]
        layer = mistake.first_layer(stage.name, model.config)
        for case, tokens in model.suite.cases.items():
            n_kv = len(tokens.ids) // 2 if mistake.after_cached else 0  # cached tokens
            traces = [*model.traces(tokens, n_kv)]
            golden = next(iter(model.suite.engine_outputs.values())).traces[case]  # inputs that the exercises hide
            trace = part_of_trace(golden, model.config, n_kv, len(tokens.ids)) | traces[-1]
            inputs = stage_inputs(
                stage, layer, model.weights, tokens.after(n_kv), trace, traces[0] if n_kv else None, reads=mistake.reads
            )
            with np.errstate(all="ignore"):
                wrong = {key(stage.name, layer): apply_mistake(mistake, inputs, stage.name)}
            yield _measure_fault(mistake.name, model, case, n_kv, wrong)


def _measure_fault(
    name: str, model: ForwardModel, case: str, n_cached: int, wrong: dict[str, np.ndarray]
) -> InjectedFault:
    """Measure a wrong stage's error in tolerances, the least over the engines; diagnose errors above `VISIBLE`."""
    tokens, (stage_key, array) = model.suite.cases[case], *wrong.items()
    expectations = [
        model.suite.chained(model.runner, case, engine, n_cached, stage_key) for engine in model.suite.engine_outputs
    ]
    factor = min(expectation.difference(array).over(expectation.tolerance) for expectation in expectations)
    first: Finding | None = next(model.causes_in(tokens, n_cached, wrong), None) if factor >= VISIBLE else None
    causes = () if first is None else (*first.causes, *first.alternatives)
    return InjectedFault(name, stage_key, factor, tuple(cause.name for cause in causes))
