"""Fault injection for lessons: a check must detect the known mistakes in a run of the learner's own solution.

In the forward pass each mistake of the library is injected into one stage of one layer while the learner's parts run.
In other lessons a mistake that people typed replaces the learner's part. A mistake counts as detected if it fails by
ten times the tolerance and gets its name.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.apps.learn.check import FORWARD, check
from llorch.apps.learn.checks.forward import ForwardModel, models_of, written_parts
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import Lesson, typed_mistakes
from llorch.diagnosis.mistakes import STAGE_MISTAKES, Mistake
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, part_of_trace, stage_inputs
from llorch.diagnosis.mistakes.variants import VISIBLE, made_wrong
from llorch.diagnosis.verdict import Finding
from llorch.stages.comparison import FAIL
from llorch.stages.table import BY_NAME, key


@dataclass(frozen=True)
class InjectedFault:
    """One known mistake in the run of a learner.

    Attributes:
        mistake: Its name.
        stage: Where it was planted, or the part that it took the place of.
        over: By what factor it exceeds what is allowed.
        named: What it was taken for, with what cannot be told from that.
    """

    mistake: str
    stage: str
    over: float
    named: tuple[str, ...]

    @property
    def bites(self) -> bool:
        """True if the check detected the mistake and named it."""
        return self.over >= VISIBLE and self.mistake in self.named


@dataclass(frozen=True)
class FaultReport:
    """All of a lesson."""

    lesson: str
    faults: Sequence[InjectedFault]

    def __str__(self) -> str:
        """Format the number of detected faults, their total, and the names of those not detected."""
        bad = [each for each in self.faults if not each.bites]
        said = [
            f"checkpoint_{self.lesson}: {len(self.faults) - len(bad)} of {len(self.faults)} known mistakes detected"
        ]
        for each in bad:
            taken = f"taken for {each.named[0]}" if each.named else "not named"
            said.append(f"  {each.mistake} in {each.stage}: {each.over:.3g} times the tolerance, {taken}")
        return "\n".join(said)


def inject_faults(lesson: Lesson, implementation: Implementation) -> FaultReport:
    """Try every known mistake of a lesson in the run of a solution that passes."""
    found = _injected_faults(lesson, implementation) if lesson.number in FORWARD else _typed(lesson, implementation)
    return FaultReport(lesson.number, list(found))


def _typed(lesson: Lesson, implementation: Implementation) -> Iterator[InjectedFault]:
    """Check the solution with each typed mistake in place of one exercise; yield the detection of each."""
    for part, wrong in typed_mistakes(lesson).items():
        for name, function in wrong.items():
            seen = check(lesson, Implementation(implementation.source, {**implementation.written, part: function}))
            named = tuple(each.name for each in seen.causes if each.kind != "near miss")
            yield InjectedFault(name, part, math.inf if seen.label == FAIL else 0.0, named)


def _injected_faults(lesson: Lesson, implementation: Implementation) -> Iterator[InjectedFault]:
    """Yield one injected fault for each mistake. The first exercise, model and case that detects it is enough."""
    parts = written_parts(lesson, implementation)
    models = [ForwardModel(model, [exercise], implementation) for exercise in parts for model in models_of(lesson)]
    for mistake in STAGE_MISTAKES:
        tried: list[InjectedFault] = []
        for fault in _check_mistake(mistake, models):
            tried.append(fault)
            if fault.bites:
                break
        if tried:
            yield max(tried, key=lambda each: (each.bites, each.over))


def _check_mistake(mistake: Mistake[StageInputs], models: Sequence[ForwardModel]) -> Iterator[InjectedFault]:
    """Inject a mistake into every model that can have it, and measure if the lesson's check would detect it."""
    for model in models:
        made = {stage for exercise in model.parts for stage in exercise.stages} - model.hidden
        shown = [name for name in mistake.stages if name in made]
        able = [BY_NAME[name] for name in shown if BY_NAME[name].applies_to(model.config)]
        if not able or not mistake.applies_to(model.config):
            continue
        stage = able[0]
        layer = stage.first_layer(model.config)
        for case, this in model.suite.cases.items():
            n = len(this.ids) // 2 if mistake.after_cached else 0
            right = [*model.traces(this, n)]
            golden = next(iter(model.suite.engine_outputs.values())).traces[case]  # of what does not show
            now = part_of_trace(golden, model.config, n, len(this.ids)) | right[-1]
            inputs = stage_inputs(
                stage, layer, model.weights, this.after(n), now, right[0] if n else None, reads=mistake.reads
            )
            with np.errstate(all="ignore"):
                wrong = {key(stage.name, layer): made_wrong(mistake, inputs, stage.name)}
            yield _injected_fault(mistake.name, model, case, n, wrong)


def _injected_fault(
    name: str, model: ForwardModel, case: str, n_cached: int, wrong: dict[str, np.ndarray]
) -> InjectedFault:
    """Measure by how many tolerances a wrong stage is off, at the engine where it is least; name the causes."""
    this, (place, array) = model.suite.cases[case], *wrong.items()
    expectations = [
        model.suite.chained(model.runner, case, engine, n_cached, place) for engine in model.suite.engine_outputs
    ]
    over = min(expectation.difference(array).over(expectation.tolerance) for expectation in expectations)
    first: Finding | None = next(model.causes_in(this, n_cached, wrong), None) if over >= VISIBLE else None
    causes = () if first is None else (*first.causes, *first.alternatives)
    return InjectedFault(name, place, over, tuple(each.name for each in causes))
