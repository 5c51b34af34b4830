"""Check of lesson 14: stages of its exercises in runs of llorch's torch modules, on the CPU, float32 and bfloat16.

Expected arrays and tolerances are those with which llorch's own torch modules are checked. Only the float32 run is
diagnosed: in bfloat16 no known mistake reproduces the numbers to the last digit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, list_written, stages_of, suite_of
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Check, Mode, NamedComparison, judge_with_arrays
from llorch.apps.learn.lessons import Lesson
from llorch.judging.runners import StageObserver
from llorch.judging.runners.torch import VARIANTS, TorchRunner
from llorch.judging.types import Comparison, Expectation
from llorch.pytorch.device import target
from llorch.runtime.threads import limit_threads
from llorch.stages.table import keys

MODELS = ("micro-llama", "micro-qwen3")  # with two values of eps; the second has q and k norms
FLOAT32, BFLOAT16 = (f"{BACKEND}-{dtype}" for dtype in ("float32", "bfloat16"))


@cache
def make_runner(model: str, backend: str) -> TorchRunner:
    """Make a runner of a built-in model on the CPU with plain torch modules (no optimized kernels)."""
    device_target = target("cpu", backend.removeprefix(f"{BACKEND}-"))
    return TorchRunner(suite_of(model).weights, device_target, VARIANTS[""], backend)


class TorchCheck(Check):
    """Check of lesson 14. In chained mode both exercises run together, on their own results."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        written = list_written(lesson, implementation)
        for model in MODELS:
            for backend in (FLOAT32, BFLOAT16):
                if mode == "chained":
                    run = OnTorch(model, backend, written, implementation)
                    yield from (("", comparison) for comparison in run.chained(stages_of(lesson)))
                    continue
                for exercise in written:
                    run = OnTorch(model, backend, [exercise], implementation)
                    yield from ((exercise.name, comparison) for comparison in run.isolated({*exercise.stages}))


class OnTorch:
    """One model in one dtype that runs with the learner's functions."""

    def __init__(self, model: str, backend: str, exercises: Sequence[Exercise], implementation: Implementation) -> None:
        """Load a built-in model on torch; `backend` has the dtype in its name."""
        self.model, self.exercises, self.implementation = model, exercises, implementation
        self.suite, self.runner = suite_of(model), make_runner(model, backend)

    def isolated(self, stages: set[str]) -> Iterator[Comparison]:
        """Compare stages that the learner's functions compute from the goldens' inputs."""
        for case, tokens in self.suite.cases.items():
            for engine, golden in self.suite.engine_outputs.items():
                trace = self._trace(lambda observe, x=(tokens, golden.traces[case]): self.runner.isolated(*x, observe))
                for name in self._keys(stages):
                    yield self._compare(self.suite.isolated(self.runner, case, engine, name), trace[name])

    def chained(self, stages: set[str]) -> Iterator[Comparison]:
        """Compare stages that the learner's functions compute in a pass, from results of earlier stages."""
        for case in self.suite.cases:
            trace = self._run(case)
            for engine in self.suite.engine_outputs:
                for name in self._keys(stages):
                    yield self._compare(self.suite.chained(self.runner, case, engine, 0, name), trace[name])

    def _run(self, case: str) -> dict[str, np.ndarray]:
        return self._trace(lambda observe: self.runner.chained(case, self.suite.cases[case], observe))

    def _trace(self, run: Callable[[StageObserver], None]) -> dict[str, np.ndarray]:
        """Run with the learner's modules installed, on one thread; return all observed stages."""
        trace: dict[str, np.ndarray] = {}

        def observe(name: str, array: np.ndarray, **flips: int) -> None:
            trace[name] = array

        with limit_threads(1), self.implementation.installed(self.exercises):
            run(observe)
        return trace

    def _keys(self, stages: set[str]) -> Iterator[str]:
        return (name for name, stage, _ in keys(self.suite.weights.config) if stage.name in stages)

    def _compare(self, expectation: Expectation, actual: np.ndarray) -> Comparison:
        """Compare an array of the learner's torch code with its expected array."""
        return judge_with_arrays(expectation, actual, model=self.model, backend=self.runner.name)
