"""Lessons of the forward pass: the stages of the micro models, beside the goldens of both engines.

A stage whose inputs all show is fed the golden's own; one with hidden inputs is judged where errors add up. The judge
computes with ours only: the learner's parts are in place while the pass runs, and out again before anything is judged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Mode, PartComparison, judge_with_arrays
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
from llorch.runtime.builtin import BUILTIN, OTHERS, builtin_path, held
from llorch.stages.stage_ref import Pass
from llorch.stages.table import Stage, keys

OF_QWEN = tuple(name for name in OTHERS if "qwen" in name)  # Llama 4 weighs what experts read: its parts are others
DENSE = tuple(name for name in BUILTIN if name.startswith("micro"))
BACKEND = "learner"
TRIED = 2  # runs whose error nothing known makes, before that is said


class ForwardCheck:
    """See `Check`."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """See `Check`."""
        for model in models_of(lesson):
            if mode == "chained":
                so_far = parts_so_far(lesson, implementation)
                run = ForwardModel(model, so_far, implementation)
                yield from (("", comparison) for comparison in run.comparisons(stages_of(lesson), mode))
                continue
            for exercise in written_parts(lesson, implementation):  # one at a time: one hides what another makes
                run = ForwardModel(model, [exercise], implementation)
                yield from ((exercise.name, comparison) for comparison in run.comparisons({*exercise.stages}, mode))

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """Diagnose the learner's run; the first function and model that give a name decide."""
        parts = {part: [PARTS[part]] if part else parts_so_far(lesson, implementation) for part, _ in wrong}
        return causes_named_by(
            wrong, lambda part, model, case: ForwardModel(model, parts[part], implementation).find_causes(case)
        )


def causes_named_by(
    wrong: Sequence[PartComparison], causes_of: Callable[[str, str, str], Iterator[Finding]]
) -> Sequence[Cause]:
    """Return the causes that diagnoses of the wrong results name.

    Diagnoses run for one exercise, model and case after another, until one gives a name.
    """
    said: list[Finding] = []
    for part, model, case in _runs(wrong):
        found = causes_of(part, model, case)
        first = next(found, None)
        said += [first] if first is not None else []
        if first is not None and first.kind == "rounding":
            said += found  # nothing else may be there
        kinds = [finding.kind for finding in said]
        if "mistake" in kinds or len(kinds) - kinds.count("rounding") >= TRIED:
            break
    return _causes_of_findings(said)


def _runs(wrong: Sequence[PartComparison]) -> list[tuple[str, str, str]]:
    """List the parts, models and cases that are wrong: each part once first, cases from position 0 first."""
    runs = list(dict.fromkeys((part, c.model, c.stage_ref.case) for part, c in wrong))
    runs.sort(key=lambda run: run[2] != "near")
    turns = [[part for part, *_ in runs[:at]].count(part) for at, (part, *_) in enumerate(runs)]
    return [runs[at] for at in sorted(range(len(runs)), key=turns.__getitem__)]


def _causes_of_findings(said: Sequence[Finding]) -> list[Cause]:
    """Return the causes of the first mistake, else of the first unknown cause, else of arithmetic."""
    found = sorted(said, key=lambda each: {"mistake": 0, "rounding": 2}.get(each.kind, 1))
    if not found:
        return []
    first = found[0]
    if first.kind == "rounding":
        return list({each.name: each for each in map(_rounding_cause, said)}.values())
    return [*_as_one(first.causes), *first.alternatives, *first.near_misses]


def _rounding_cause(finding: Finding) -> Cause:
    """Make the cause of a finding of kind rounding: the arithmetic that explains it, with no stage to mend."""
    if finding.causes:
        return replace(_as_one(finding.causes)[0], stages=())
    kind = finding.sentence.partition(":")[0]
    return Cause(kind, "rounding", f"Numbers are {kind}.", (), 1.0, 1.0)


def _as_one(causes: Sequence[Cause]) -> list[Cause]:
    """Join two causes that explain an error together."""
    if len(causes) < 2:
        return [*causes]
    name, sentence = " + ".join(each.name for each in causes), " And: ".join(each.sentence for each in causes)
    return [replace(causes[0], name=name, sentence=sentence)]


def written_parts(lesson: Lesson, implementation: Implementation) -> list[Exercise]:
    """Return the exercises of a lesson that are written."""
    return [exercise for exercise in lesson.parts if exercise.name in implementation.written]


def parts_so_far(lesson: Lesson, implementation: Implementation) -> list[Exercise]:
    """List the written parts of the lessons up to this one."""
    lessons = LESSONS[: LESSONS.index(lesson) + 1]
    return [exercise for each in lessons for exercise in written_parts(each, implementation)]


@cache
def models_of(lesson: Lesson) -> Sequence[str]:
    """Choose the built-in models that check a lesson: dense ones if those have its stages, else Qwen models."""
    wanted = stages_of(lesson)

    def has(model: str) -> bool:
        return any(stage.name in wanted for _, stage, _ in keys(open_weights(builtin_path(model)).config))

    return [model for model in held(DENSE) if has(model)] or [model for model in OF_QWEN if has(model)]


def stages_of(lesson: Lesson) -> set[str]:
    """Return the names of the stages that a lesson is about."""
    return {stage for exercise in lesson.parts for stage in exercise.stages}


@cache
def suite_of(model: str) -> ForwardExpectations:
    """Load the expectations of a built-in model; made once."""
    weights, golden = stored(model)
    return ForwardExpectations(model, weights, golden.cases, golden.engine_outputs, golden.reference)


@cache
def wide(model: str) -> Weights:
    """Open a built-in model in float64, the dtype in which a diagnosis computes."""
    return suite_of(model).weights.astype(np.float64, keep=True)


class ForwardModel:
    """One model with the learner's parts in it."""

    def __init__(self, model: str, parts: Sequence[Exercise], implementation: Implementation) -> None:
        """Load a built-in model by name, with the learner's functions in place."""
        self.model, self.parts, self.implementation = model, parts, implementation
        self.suite = suite_of(model)
        self.weights, self.config = self.suite.weights, self.suite.weights.config
        self.runner = NumpyRunner(self.weights, BACKEND)
        self.hidden = {name for exercise in parts for name in exercise.hidden(self.config)}

    def comparisons(self, stages: set[str], mode: Mode) -> Iterator[Comparison]:
        """Compare stages: isolated if the mode is and all inputs are visible, else chained; also cached passes."""
        alone = {stage.name for stage in self._visible_stages(stages) if mode == "isolated" and self._alone(stage)}
        for case, this in self.suite.cases.items():
            yield from self._isolated(case, this, alone)
            yield from self._chained(case, this, stages - alone, 0)
            for n_cached in this.splits:
                yield from self._chained(case, this, stages, n_cached)

    def trace(self, this: Pass, **how: object) -> dict[str, np.ndarray]:
        """Return every stage that shows, of a pass with the learner's parts."""
        with self.implementation.installed(self.parts):
            return run(self.weights, this, **how)  # type: ignore[arg-type]

    def find_causes(self, case: str) -> Iterator[Finding]:
        """Diagnose a case that runs in two passes, the second on the cache of the first; yield the findings."""
        this = self.suite.cases[case]
        return self.causes_in(this, len(this.ids) // 2)

    def causes_in(self, this: Pass, n_cached: int, wrong: Trace = MappingProxyType({})) -> Iterator[Finding]:
        """Diagnose a pass with injected results in `wrong`; the run is over before the diagnosis begins."""
        traces = self.traces(this, n_cached, wrong)
        begin = [Pass(this.ids[:n_cached], this.first_position)] if n_cached else []
        return findings(wide(self.model), StageDump.of_arrays([*begin, this.after(n_cached)], *traces))

    def traces(self, this: Pass, n_cached: int, wrong: Trace = MappingProxyType({})) -> list[dict[str, np.ndarray]]:
        """Return every stage that shows, of one or two passes; in the last one `wrong` takes the place of some."""
        cache = KVCache(self.config, self.weights.dtype, first_position=this.first_position)
        passes = [ids for ids in (this.ids[:n_cached], this.ids[n_cached:]) if ids]
        traces: list[dict[str, np.ndarray]] = []

        def keep(name: str, array: np.ndarray) -> np.ndarray:
            traces[-1][name] = wrong.get(name, array) if len(traces) == len(passes) else array
            return traces[-1][name]

        stopping = suppress(Exception) if wrong else nullcontext()  # nothing goes on with an array of another shape
        with stopping, np.errstate(all="ignore" if wrong else None), self.implementation.installed(self.parts):
            for ids in passes:
                traces.append({})
                forward(np.asarray(ids), self.weights, cache, keep=keep)
        return traces

    def _isolated(self, case: str, this: Pass, stages: set[str]) -> Iterator[Comparison]:
        """Compare stages computed from each engine's golden inputs."""
        for engine, golden in self.suite.engine_outputs.items() if stages else ():
            trace = self.trace(this, golden=golden.traces[case])
            for name in self._keys(stages):
                yield self._compare(self.suite.isolated(self.runner, case, engine, name), trace.get(name))

    def _chained(self, case: str, this: Pass, stages: set[str], n_cached: int) -> Iterator[Comparison]:
        """Compare stages of one run from the token ids, after `n_cached` tokens, with each engine."""
        if not (names := list(self._keys(stages))):
            return
        trace = self.trace(this, n_cached=n_cached)
        for engine in self.suite.engine_outputs:
            for name in names:
                yield self._compare(self.suite.chained(self.runner, case, engine, n_cached, name), trace.get(name))

    def _compare(self, expectation: Expectation, actual: np.ndarray | None) -> Comparison:
        """Compare an array of the learner's code with its expected array."""
        return judge_with_arrays(expectation, actual, model=self.model, backend=BACKEND)

    def _keys(self, stages: set[str]) -> Iterator[str]:
        shown = self._visible_stages(stages)
        return (name for name, stage, _ in keys(self.config) if stage in shown)

    def _visible_stages(self, stages: set[str]) -> list[Stage]:
        """List those of some stages that the model has and the check does not hide, in the order of the run."""
        found = {stage.name: stage for _, stage, _ in keys(self.config)}
        return [stage for name, stage in found.items() if name in stages - self.hidden]

    def _alone(self, stage: Stage) -> bool:
        """Tell if all inputs of the stage are visible."""
        return not self.hidden & set(stage.input_names(self.config))
