"""Checks of the forward pass: stages of small built-in models, compared with the goldens of both reference engines.

An isolated stage is computed from the golden's arrays, a chained one from the results of earlier stages. A stage whose
inputs an exercise hides (`Exercise.hidden`) is always checked in a chained run. A case is an input of the goldens:
`near` starts at position 0, `far` at about 4,000. The learner's functions are installed only while the pass runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Mode, NamedComparison, judge_with_arrays
from llorch.apps.learn.lessons import LESSONS, PARTS, Lesson
from llorch.diagnosis.diagnose import findings
from llorch.diagnosis.verdict import Finding
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import Weights, open_weights
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.runners import Trace
from llorch.judging.runners.numpy import NumpyRunner, run
from llorch.judging.types import Cause, Comparison, Expectation
from llorch.judging.verify import stored
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.builtin import BUILTIN, OTHERS, builtin_path, models_with_goldens
from llorch.stages.stage_ref import Pass
from llorch.stages.table import Stage, keys

QWEN = tuple(name for name in OTHERS if "qwen" in name)  # no Llama 4: no exercise weights the inputs of experts
DENSE = tuple(name for name in BUILTIN if name.startswith("micro"))
BACKEND = "learner"
MAX_UNEXPLAINED = 2  # the search ends after so many diagnosed runs without a known mistake


class ForwardCheck:
    """Check of the lessons of the forward pass, see `Check`."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        for model in models_of(lesson):
            if mode == "chained":
                so_far = exercises_so_far(lesson, implementation)
                run = ForwardModel(model, so_far, implementation)
                yield from (("", comparison) for comparison in run.comparisons(stages_of(lesson), mode))
                continue
            for exercise in list_written(lesson, implementation):  # one at a time: it may hide stages of another
                run = ForwardModel(model, [exercise], implementation)
                yield from ((exercise.name, comparison) for comparison in run.comparisons({*exercise.stages}, mode))

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """Diagnose the learner's failed runs until one has a known mistake."""
        groups = {name: [PARTS[name]] if name else exercises_so_far(lesson, implementation) for name, _ in wrong}
        return diagnose_runs(
            wrong, lambda name, model, case: ForwardModel(model, groups[name], implementation).find_causes(case)
        )


def diagnose_runs(
    wrong: Sequence[NamedComparison], diagnose: Callable[[str, str, str], Iterator[Finding]]
) -> Sequence[Cause]:
    """Diagnose the wrong runs one after another, until one has a known mistake; return its causes.

    A run is one exercise, model and case; `diagnose` yields its findings.
    """
    diagnoses: list[Finding] = []
    for exercise_name, model, case in _order_runs(wrong):
        case_findings = diagnose(exercise_name, model, case)
        first = next(case_findings, None)
        diagnoses += [first] if first is not None else []
        if first is not None and first.kind == "rounding":
            diagnoses += case_findings  # the other findings too: all must be rounding, or the lesson fails
        kinds = [finding.kind for finding in diagnoses]
        if "mistake" in kinds or len(kinds) - kinds.count("rounding") >= MAX_UNEXPLAINED:
            break
    return _causes_of_findings(diagnoses)


def _order_runs(wrong: Sequence[NamedComparison]) -> list[tuple[str, str, str]]:
    """List the wrong (exercise, model, case): the first run of each exercise first, the case `near` first."""
    runs = list(dict.fromkeys((exercise_name, c.model, c.stage_ref.case) for exercise_name, c in wrong))
    runs.sort(key=lambda run: run[2] != "near")
    n_earlier = [[name for name, *_ in runs[:index]].count(name) for index, (name, *_) in enumerate(runs)]
    return [runs[index] for index in sorted(range(len(runs)), key=n_earlier.__getitem__)]


def _causes_of_findings(diagnoses: Sequence[Finding]) -> list[Cause]:
    """Return the causes of the first known mistake, else of the first unexplained error, else of rounding."""
    by_kind = sorted(diagnoses, key=lambda finding: {"mistake": 0, "rounding": 2}.get(finding.kind, 1))
    if not by_kind:
        return []
    first = by_kind[0]
    if first.kind == "rounding":
        return list({cause.name: cause for cause in map(_rounding_cause, diagnoses)}.values())
    return [*_join_causes(first.causes), *first.alternatives, *first.near_misses]


def _rounding_cause(finding: Finding) -> Cause:
    """Make the cause of a rounding finding: the arithmetic that explains it, without a stage to repair."""
    if finding.causes:
        return replace(_join_causes(finding.causes)[0], stages=())
    kind = finding.sentence.partition(":")[0]
    return Cause(kind, "rounding", f"Numbers are {kind}.", (), 1.0, 1.0)


def _join_causes(causes: Sequence[Cause]) -> list[Cause]:
    """Join causes that explain an error only together."""
    if len(causes) < 2:
        return [*causes]
    name, sentence = " + ".join(cause.name for cause in causes), " And: ".join(cause.sentence for cause in causes)
    return [replace(causes[0], name=name, sentence=sentence)]


def list_written(lesson: Lesson, implementation: Implementation) -> list[Exercise]:
    """Return the exercises of a lesson that the learner has written."""
    return [exercise for exercise in lesson.parts if exercise.name in implementation.written]


def exercises_so_far(lesson: Lesson, implementation: Implementation) -> list[Exercise]:
    """Return the written exercises of the lessons up to this one."""
    lessons = LESSONS[: LESSONS.index(lesson) + 1]
    return [exercise for earlier in lessons for exercise in list_written(earlier, implementation)]


@cache
def models_of(lesson: Lesson) -> Sequence[str]:
    """Choose the built-in models that check a lesson: dense models if they have its stages, else Qwen models.

    A lesson without stages has none. A wheel has no Qwen models beside the dense ones: `NotInWheel` names the first.
    """
    stages = stages_of(lesson)
    if not stages:
        return []

    def has_stages(model: str) -> bool:
        return any(stage.name in stages for _, stage, _ in keys(open_weights(builtin_path(model)).config))

    return [*filter(has_stages, models_with_goldens(DENSE))] or [*filter(has_stages, QWEN)]


def stages_of(lesson: Lesson) -> set[str]:
    """Return the names of the stages that a lesson's exercises compute."""
    return {stage for exercise in lesson.parts for stage in exercise.stages}


@cache
def suite_of(model: str) -> ForwardExpectations:
    """Load the expectations (expected arrays and tolerances) of a built-in model, once."""
    weights, golden = stored(model)
    return ForwardExpectations(model, weights, golden.cases, golden.engine_outputs, golden.reference)


@cache
def float64_weights(model: str) -> Weights:
    """Open a built-in model in float64 (each tensor converted once), the dtype in which a diagnosis computes."""
    return suite_of(model).weights.astype(np.float64, keep=True)


class ForwardModel:
    """One built-in model that runs with the learner's functions for some exercises."""

    def __init__(self, model: str, exercises: Sequence[Exercise], implementation: Implementation) -> None:
        """Load a built-in model; `hidden` are the stages that no observer sees with these exercises."""
        self.model, self.exercises, self.implementation = model, exercises, implementation
        self.suite = suite_of(model)
        self.weights, self.config = self.suite.weights, self.suite.weights.config
        self.runner = NumpyRunner(self.weights, BACKEND)
        self.hidden = {name for exercise in exercises for name in exercise.hidden(self.config)}

    def comparisons(self, stages: set[str], mode: Mode) -> Iterator[Comparison]:
        """Compare stages, isolated if `mode` is and all inputs are visible, else chained; then with cached tokens."""
        isolated = {s.name for s in self._visible_stages(stages) if mode == "isolated" and self._can_isolate(s)}
        for case, tokens in self.suite.cases.items():
            yield from self._isolated(case, tokens, isolated)
            yield from self._chained(case, tokens, stages - isolated, 0)
            for n_cached in tokens.splits:
                yield from self._chained(case, tokens, stages, n_cached)

    def trace(self, tokens: Pass, **settings: object) -> dict[str, np.ndarray]:
        """Return every visible stage of a pass with the learner's exercises."""
        with self.implementation.installed(self.exercises):
            return run(self.weights, tokens, **settings)  # type: ignore[arg-type]

    def find_causes(self, case: str) -> Iterator[Finding]:
        """Diagnose a case in two passes, the second with the first in its cache; yield the findings."""
        tokens = self.suite.cases[case]
        return self.causes_in(tokens, len(tokens.ids) // 2)

    def causes_in(self, tokens: Pass, n_cached: int, wrong: Trace = MappingProxyType({})) -> Iterator[Finding]:
        """Diagnose a pass with the arrays of `wrong` injected; it ends first, so that no learner code is installed."""
        traces = self.traces(tokens, n_cached, wrong)
        first = [Pass(tokens.ids[:n_cached], tokens.first_position)] if n_cached else []
        return findings(float64_weights(self.model), StageDump.of_arrays([*first, tokens.after(n_cached)], *traces))

    def traces(self, tokens: Pass, n_cached: int, wrong: Trace = MappingProxyType({})) -> list[dict[str, np.ndarray]]:
        """Return every visible stage of one or two passes; arrays of `wrong` replace stages of the last pass."""
        cache = KVCache(self.config, self.weights.dtype, first_position=tokens.first_position)
        passes = [ids for ids in (tokens.ids[:n_cached], tokens.ids[n_cached:]) if ids]
        traces: list[dict[str, np.ndarray]] = []

        def record(name: str, array: np.ndarray) -> np.ndarray:
            traces[-1][name] = wrong.get(name, array) if len(traces) == len(passes) else array
            return traces[-1][name]

        error_guard = suppress(Exception) if wrong else nullcontext()  # an injected array may have a wrong shape
        with error_guard, np.errstate(all="ignore" if wrong else None), self.implementation.installed(self.exercises):
            for ids in passes:
                traces.append({})
                forward(np.asarray(ids), self.weights, cache, keep=record)
        return traces

    def _isolated(self, case: str, tokens: Pass, stages: set[str]) -> Iterator[Comparison]:
        """Compare stages that the learner's functions compute from the golden inputs of each engine."""
        for engine, golden in self.suite.engine_outputs.items() if stages else ():
            trace = self.trace(tokens, golden=golden.traces[case])
            for name in self._keys(stages):
                yield self._compare(self.suite.isolated(self.runner, case, engine, name), trace.get(name))

    def _chained(self, case: str, tokens: Pass, stages: set[str], n_cached: int) -> Iterator[Comparison]:
        """Compare stages that the learner's functions compute in one chained run, after `n_cached` cached tokens."""
        if not (names := list(self._keys(stages))):
            return
        trace = self.trace(tokens, n_cached=n_cached)
        for engine in self.suite.engine_outputs:
            for name in names:
                yield self._compare(self.suite.chained(self.runner, case, engine, n_cached, name), trace.get(name))

    def _compare(self, expectation: Expectation, actual: np.ndarray | None) -> Comparison:
        """Compare an array of the learner's code with its expected array."""
        return judge_with_arrays(expectation, actual, model=self.model, backend=BACKEND)

    def _keys(self, stages: set[str]) -> Iterator[str]:
        visible = self._visible_stages(stages)
        return (name for name, stage, _ in keys(self.config) if stage in visible)

    def _visible_stages(self, stages: set[str]) -> list[Stage]:
        """Filter stages that the model has and the exercises do not hide, in the order of the run."""
        model_stages = {stage.name: stage for _, stage, _ in keys(self.config)}
        return [stage for name, stage in model_stages.items() if name in stages - self.hidden]

    def _can_isolate(self, stage: Stage) -> bool:
        """Tell if all inputs of the stage are visible."""
        return not self.hidden & set(stage.input_names(self.config))
