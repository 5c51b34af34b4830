"""Checks of the training lessons: the training run of a golden with the learner's exercises, in float32.

In isolated mode the exercises of the lesson are installed one at a time, and stages are computed from the golden's
arrays if possible. Only `FIRST_STEPS` of the loss curve (19) run, and only the adapter file (20) is written. In chained
mode all exercises written so far run together from the token ids on, with all steps and all files.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, exercises_so_far, list_written
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Check, Mode, NamedComparison, judge_with_arrays
from llorch.apps.learn.lessons import Lesson
from llorch.files import Weights
from llorch.judging.expectations.adapter_files import Table, compare_file, exported, gguf_table
from llorch.judging.expectations.training import make_expectations, stored
from llorch.judging.expectations.training_refs import CHAINED, ISOLATED, Arrays
from llorch.judging.goldens.training import MODELS, TrainingGolden
from llorch.judging.runners.training_numpy import NumpyTrainingRunner, Results
from llorch.judging.types import Comparison, Expectation
from llorch.lora.gguf_format import write_lora_gguf
from llorch.runtime.errors import LearnerFault

FIRST_STEPS = 4  # every mistake of a step is visible in them
CHAINABLE = ("llorch.ops.", "llorch.model.backward.", "llorch.training.", "llorch.lora.", "llorch.files.tensor_names.")
HIDING_OTHERS = ("llorch.ops.linear.linear",)  # it applies the adapter, so it hides the LoRA exercises


class TrainingCheck(Check):
    """Check of the training lessons, see `Check`."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        for run, exercises in make_runs(lesson, implementation, mode):
            exercise_name = exercises[0].name if mode == "isolated" else ""
            output = run.run(install_exercises(implementation, exercises))
            yield from ((exercise_name, comparison) for comparison in run.comparisons(output))


@dataclass(frozen=True)
class TrainingOutput:
    """Output of a run: arrays by mode (isolated, chained), and the tensor tables of written files."""

    arrays: Mapping[str, Arrays]
    tables: Mapping[str, Table] = field(default_factory=dict)


def make_runs(
    lesson: Lesson, implementation: Implementation, mode: Mode
) -> "Iterator[tuple[CheckpointRun, Sequence[Exercise]]]":
    """Yield every run of a check with the exercises to install."""
    for model in MODELS:
        if mode == "chained":
            exercises = [exercise for exercise in exercises_so_far(lesson, implementation) if _may_chain(exercise)]
            stages = frozenset(stage for exercise in lesson.parts for stage in exercise.stages)
            yield CheckpointRun(model, lesson.number, stages, mode), exercises
            continue
        for exercise in list_written(lesson, implementation):
            yield CheckpointRun(model, lesson.number, frozenset(exercise.stages), mode), [exercise]


def _may_chain(exercise: Exercise) -> bool:
    """Tell if an exercise may run chained, so that the adapter and the backward pass still get their inputs."""
    return exercise.replaces.startswith(CHAINABLE) and exercise.replaces not in HIDING_OTHERS


@contextmanager
def install_exercises(implementation: Implementation, exercises: Sequence[Exercise]) -> Iterator[None]:
    """Install the learner's functions; an error of llorch's code on their results becomes a LearnerFault."""
    with implementation.installed(exercises):
        try:
            yield
        except (ValueError, IndexError) as error:
            exercise_name = exercises[0].name if len(exercises) == 1 else "a part"
            raise LearnerFault(exercise_name, f"the training step failed with the returned value: {error}") from error


@cache
def load_training(model: str) -> tuple[Weights, TrainingGolden, Sequence[Expectation]]:
    """Load a model in float32, its goldens and their expectations, once."""
    weights, golden = stored(model)
    return weights.astype(np.float32, keep=True), golden, tuple(make_expectations(golden, weights.config, "float32"))


class CheckpointRun:
    """Run of one training checkpoint (validation point) of one model, for some groups of stages (`gradient`)."""

    def __init__(self, model: str, number: str, groups: frozenset[str], mode: Mode) -> None:
        """Prepare a checkpoint of a built-in model: select the expected arrays of these groups."""
        self.model, self.number, self.groups, self.is_chained = model, number, groups, mode == "chained"
        self.weights, self.golden, expectations = load_training(model)
        selected = [e for e in expectations if e.stage_ref.stage in groups and e.stage_ref.checkpoint == number]
        self.expectations = selected if self.is_chained else [_cut_curve(e) for e in selected if _is_brief(e)]

    def run(self, context: AbstractContextManager[None]) -> TrainingOutput:
        """Run the checkpoint in a context that replaces functions of llorch."""
        with context:
            runner = NumpyTrainingRunner(self.weights, self.golden)  # new each run: it caches scalings
            arrays = {ISOLATED: dict(runner.isolated(self.number)), CHAINED: dict(self._chained(runner))}
            if not self.is_chained:
                return TrainingOutput(arrays, self._adapter_file() if "adapter_file" in self.groups else {})
            if self.number != "20":
                return TrainingOutput(arrays)
            logits, tables = exported(self.weights, self.golden)
            return TrainingOutput(arrays | {CHAINED: arrays[CHAINED] | logits}, tables)

    def _chained(self, runner: NumpyTrainingRunner) -> Results:
        """Run all chained steps; in isolated mode only those of lessons without isolated stages."""
        if self.is_chained:
            return runner.chained(self.number)
        brief = {"19": lambda: runner.curve(FIRST_STEPS), "20": runner.merged}
        return brief.get(self.number, lambda: iter(()))()

    def _adapter_file(self) -> Mapping[str, Table]:
        """Write the adapter as a GGUF file, and read its tensor table."""
        config = self.weights.config
        with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
            path = Path(folder) / "adapter.gguf"
            write_lora_gguf(self.golden.adapter_for(config), path, config)
            return {"lora_gguf": gguf_table(path)}

    def comparisons(self, output: TrainingOutput) -> Iterator[Comparison]:
        """Compare each array of the learner with its expectation, and each file with its golden."""
        for expectation in self.expectations:
            actual = output.arrays[expectation.mode].get(expectation.stage_ref)
            yield judge_with_arrays(expectation, actual, model=self.model, backend=BACKEND)
        for kind, table in output.tables.items():
            yield replace(compare_file(self.model, kind, table, self.golden.files[kind]), backend=BACKEND)


def _is_brief(expectation: Expectation) -> bool:
    """Tell if isolated mode compares an expectation: of an isolated stage, or of a short chained run."""
    stage_ref = expectation.stage_ref
    return expectation.mode == ISOLATED or stage_ref.checkpoint == "19" or stage_ref.stage == "merged_logits"


def _cut_curve(expectation: Expectation) -> Expectation:
    """Cut the expectation of a loss curve to its first steps."""
    if expectation.stage_ref.checkpoint != "19" or expectation.reference is None:
        return expectation
    return replace(
        expectation, expected=expectation.expected[:FIRST_STEPS], reference=expectation.reference[:FIRST_STEPS]
    )
