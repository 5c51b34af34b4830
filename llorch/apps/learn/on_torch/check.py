"""Lesson 14: the stages of its parts in the run of our torch modules, on the CPU, in float32 and in bfloat16.

Expectations and tolerances are those of checkpoint 14. A name is looked for in what the float32 run shows: in bfloat16
no known mistake makes the same numbers to the last digit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, causes_named_by, stages_of, suite_of, wide, written_parts
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Mode, PartComparison, judge_with_arrays
from llorch.apps.learn.lessons import PARTS, Lesson
from llorch.diagnosis.diagnose import findings
from llorch.diagnosis.verdict import Finding
from llorch.engines.dumps.stage_dump import StageDump
from llorch.judging.runners import StageObserver
from llorch.judging.runners.torch import VARIANTS, TorchRunner
from llorch.judging.types import Cause, Comparison, Expectation
from llorch.pytorch.device import target
from llorch.runtime.threads import limited
from llorch.stages.table import keys

MODELS = ("micro-llama", "micro-qwen3")  # of either eps; with norms of heads
FLOAT32, BFLOAT16 = (f"{BACKEND}-{dtype}" for dtype in ("float32", "bfloat16"))


@cache
def runner_of(model: str, backend: str) -> TorchRunner:
    """Make a runner of a built-in model on the CPU, with the reference implementation as it is written."""
    at = target("cpu", backend.removeprefix(f"{BACKEND}-"))
    return TorchRunner(suite_of(model).weights, at, VARIANTS[""], backend)


class TorchCheck:
    """See `Check`. Chained, both parts run at once, on what they made themselves."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """See `Check`."""
        written = written_parts(lesson, implementation)
        for model in MODELS:
            for backend in (FLOAT32, BFLOAT16):
                if mode == "chained":
                    run = OnTorch(model, backend, written, implementation)
                    yield from (("", comparison) for comparison in run.chained(stages_of(lesson)))
                    continue
                for exercise in written:
                    run = OnTorch(model, backend, [exercise], implementation)
                    yield from ((exercise.name, comparison) for comparison in run.isolated({*exercise.stages}))

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """Diagnose the float32 run; return no cause if that run is right."""
        written = written_parts(lesson, implementation)

        def causes_of(part: str, model: str, case: str) -> Iterator[Finding]:
            return OnTorch(model, FLOAT32, [PARTS[part]] if part else written, implementation).find_causes(case)

        return causes_named_by([(part, c) for part, c in wrong if c.backend == FLOAT32], causes_of)


class OnTorch:
    """One model in one dtype with the learner's parts in it."""

    def __init__(self, model: str, backend: str, parts: Sequence[Exercise], implementation: Implementation) -> None:
        """Load a built-in model by name on torch, with the learner's functions in place."""
        self.model, self.parts, self.implementation = model, parts, implementation
        self.suite, self.runner = suite_of(model), runner_of(model, backend)

    def isolated(self, stages: set[str]) -> Iterator[Comparison]:
        """Compare every stage, fed the numbers of the goldens."""
        for case, this in self.suite.cases.items():
            for engine, golden in self.suite.engine_outputs.items():
                trace = self._trace(lambda observe, at=(this, golden.traces[case]): self.runner.isolated(*at, observe))
                for name in self._keys(stages):
                    yield self._compare(self.suite.isolated(self.runner, case, engine, name), trace[name])

    def chained(self, stages: set[str]) -> Iterator[Comparison]:
        """Compare every stage of a pass, fed the results of the stages before it."""
        for case in self.suite.cases:
            trace = self._pass(case)
            for engine in self.suite.engine_outputs:
                for name in self._keys(stages):
                    yield self._compare(self.suite.chained(self.runner, case, engine, 0, name), trace[name])

    def find_causes(self, case: str) -> Iterator[Finding]:
        """Diagnose one pass; the run is over before the diagnosis begins."""
        return findings(wide(self.model), StageDump.of_arrays([self.suite.cases[case]], self._pass(case)))

    def _pass(self, case: str) -> dict[str, np.ndarray]:
        return self._trace(lambda observe: self.runner.chained(case, self.suite.cases[case], observe))

    def _trace(self, run: Callable[[StageObserver], None]) -> dict[str, np.ndarray]:
        """Run with the learner's modules installed, on one thread; return all observed stages."""
        trace: dict[str, np.ndarray] = {}

        def observe(name: str, array: np.ndarray, **flips: int) -> None:
            trace[name] = array

        with limited(1), self.implementation.installed(self.parts):
            run(observe)
        return trace

    def _keys(self, stages: set[str]) -> Iterator[str]:
        return (name for name, stage, _ in keys(self.suite.weights.config) if stage.name in stages)

    def _compare(self, expectation: Expectation, actual: np.ndarray) -> Comparison:
        """Compare an array of the learner's torch code with its expected array."""
        return judge_with_arrays(expectation, actual, model=self.model, backend=self.runner.name)
