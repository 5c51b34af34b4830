"""The learner's trace of a built-in model beside llama.cpp's golden, stage by stage, in one chained run."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, ForwardModel, suite_of
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.judging import judge_with_arrays
from llorch.apps.learn.lessons import exercises_of_run
from llorch.judging.types import Comparison
from llorch.stages.table import keys

ENGINE, CASE = "llamacpp", "near"
HIDING = "block"  # exercise that hides the stages of a layer


@dataclass(frozen=True)
class TracedStage:
    """One stage of both traces.

    Attributes:
        name: Trace key, such as `l0.q_rope`.
        expected: llama.cpp's array.
        comparison: Comparison of the learner's array; None for a stage inside a function of the learner.
    """

    name: str
    expected: np.ndarray
    comparison: Comparison | None


def trace_beside(implementation: Implementation, model: str) -> Iterator[TracedStage]:
    """Run a built-in model with the learner's functions, but `HIDING`; yield its stages beside llama.cpp's.

    Raises:
        LearnerFault: A function of the learner fails.
        NotInWheel: The wheel does not contain goldens of the model.
    """
    exercises = [e for e in exercises_of_run(suite_of(model).weights.config) if e.name != HIDING]
    run = ForwardModel(model, exercises, implementation)
    trace, golden = run.trace(run.suite.cases[CASE]), run.suite.engine_outputs[ENGINE].traces[CASE]
    for name, _, _ in keys(run.config):
        comparison = None
        if (actual := trace.get(name)) is not None:
            expectation = run.suite.chained(run.runner, CASE, ENGINE, 0, name)
            comparison = judge_with_arrays(expectation, actual, model=model, backend=BACKEND)
        yield TracedStage(name, golden[name], comparison)
