"""Lessons of training: a golden's run with the learner's parts in it, judged by the expectations of training.

Isolated, the parts of the lesson are put in one at a time, and every stage that can be is fed the golden's own numbers;
of the curve only the first steps are run, of files only the adapter's is written. Chained, all that is written by then
runs from the tokens on: all steps, all files. In both, float32 computes.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, parts_so_far, written_parts
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.judging import Mode, PartComparison, judge_with_arrays
from llorch.apps.learn.lessons import Lesson
from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.mistake import injected
from llorch.diagnosis.training.hypotheses import RANDOM
from llorch.files import Weights
from llorch.judging.expectations.adapter_files import Table, exported, file_row, gguf_table
from llorch.judging.expectations.training import make_expectations, stored
from llorch.judging.expectations.training_places import CHAINED, ISOLATED, Arrays
from llorch.judging.goldens.training import MODELS, TrainingGolden
from llorch.judging.runners.training_numpy import NumpyTrainingRunner, Results
from llorch.judging.types import Cause, Comparison, Expectation
from llorch.lora.gguf_format import write_lora_gguf
from llorch.runtime.errors import LearnerFault
from llorch.stages.comparison import FAIL, times_over

FIRST_STEPS = 4  # of the curve: every mistake of a step shows in them
ROUNDING = 1e-5  # of an error: what float32 makes of the same wrong formula in another order
REMEMBERS = (*RANDOM, "adamw-step-counted-per-tensor")  # mistakes that make other numbers in every run
IN_A_STEP = ("llorch.ops.", "llorch.model.backward.", "llorch.training.", "llorch.lora.", "llorch.files.tensor_names.")
HIDING = ("llorch.ops.linear.linear",)  # merges what stands beside a matrix


class TrainingCheck:
    """See `Check`."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """See `Check`."""
        for run, parts in runs(lesson, implementation, mode):
            alone = parts[0].name if mode == "isolated" else ""
            output = run.made(learned(implementation, parts))
            yield from ((alone, comparison) for comparison in run.comparisons(output))

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """Name the known mistakes of the lesson that make llorch's code give the learner's results, the best first.

        In both modes the search runs each part in isolation: a part that is right there was given wrong inputs.
        """
        for run, parts in runs(lesson, implementation, "isolated"):
            theirs = run.made(learned(implementation, parts))
            if not any(each.verdict == FAIL for each in run.comparisons(theirs)):
                continue
            known = [m for m in TRAINING if lesson.number in m.checkpoints and m.applies_to(run.weights.config)]
            if not theirs.equals(run.made(learned(implementation, parts))):
                return [Cause(m.name, "mistake", m.diagnosis, m.stages, 1.0, 0.0) for m in known if m.name in REMEMBERS]
            if found := [one for one in (run.explained(theirs, m) for m in known) if one]:
                return sorted(found, key=lambda cause: cause.remaining)
        return []


@dataclass(frozen=True)
class TrainingOutput:
    """What a run made: arrays by the mode they were reached in, and the tensors of files."""

    arrays: Mapping[str, Arrays]
    tables: Mapping[str, Table] = field(default_factory=dict)

    def equals(self, other: "TrainingOutput") -> bool:
        """Tell if two outputs are equal to the last bit."""
        mine, others = ([a for found in made.arrays.values() for a in found.values()] for made in (self, other))
        return all(map(np.array_equal, mine, others)) and self.tables == other.tables


def runs(
    lesson: Lesson, implementation: Implementation, mode: Mode
) -> "Iterator[tuple[CheckpointRun, Sequence[Exercise]]]":
    """Yield every run of a check, and the parts that are in it."""
    for model in MODELS:
        if mode == "chained":
            parts = [exercise for exercise in parts_so_far(lesson, implementation) if _may_chain(exercise)]
            stages = frozenset(stage for exercise in lesson.parts for stage in exercise.stages)
            yield CheckpointRun(model, lesson.number, stages, mode), parts
            continue
        for exercise in written_parts(lesson, implementation):
            yield CheckpointRun(model, lesson.number, frozenset(exercise.stages), mode), [exercise]


def _may_chain(exercise: Exercise) -> bool:
    """Tell if the adapter and the backward pass get all that they need after a part."""
    return exercise.replaces.startswith(IN_A_STEP) and exercise.replaces not in HIDING


@contextmanager
def learned(implementation: Implementation, parts: Sequence[Exercise]) -> Iterator[None]:
    """Put the learner's parts in place; an error of llorch's code on their results is the fault of the parts."""
    with implementation.installed(parts):
        try:
            yield
        except (ValueError, IndexError) as error:
            where = parts[0].name if len(parts) == 1 else "a part"
            raise LearnerFault(where, f"the training step failed with the returned value: {error}") from error


@cache
def load_training(model: str) -> tuple[Weights, TrainingGolden, Sequence[Expectation]]:
    """Load a model in float32, its goldens and their expectations; made once."""
    weights, golden = stored(model)
    return weights.astype(np.float32, keep=True), golden, tuple(make_expectations(golden, weights.config, "float32"))


class CheckpointRun:
    """One checkpoint of one model, as far as some groups of its stages go."""

    def __init__(self, model: str, number: str, groups: frozenset[str], mode: Mode) -> None:
        """Prepare one checkpoint of a built-in model."""
        self.model, self.number, self.groups, self.whole = model, number, groups, mode == "chained"
        self.weights, self.golden, of_model = load_training(model)
        mine = [c for c in of_model if c.stage_ref.stage in groups and c.stage_ref.checkpoint == number]
        self.expectations = mine if self.whole else [_shortened(c) for c in mine if _is_brief(c)]

    def made(self, within: AbstractContextManager[None]) -> TrainingOutput:
        """Run it, with whatever the context puts into our code."""
        with within:
            runner = NumpyTrainingRunner(self.weights, self.golden)  # anew: it keeps the scales of its adapter
            arrays = {ISOLATED: dict(runner.isolated(self.number)), CHAINED: dict(self._chained(runner))}
            if not self.whole:
                return TrainingOutput(arrays, self._adapter_file() if "adapter_file" in self.groups else {})
            if self.number != "20":
                return TrainingOutput(arrays)
            logits, tables = exported(self.weights, self.golden)
            return TrainingOutput(arrays | {CHAINED: arrays[CHAINED] | logits}, tables)

    def _chained(self, runner: NumpyTrainingRunner) -> Results:
        """Run the chained steps, all of them or those by which a lesson without isolated stages is judged."""
        if self.whole:
            return runner.chained(self.number)
        brief = {"19": lambda: runner.curve(FIRST_STEPS), "20": runner.merged}
        return brief.get(self.number, lambda: iter(()))()

    def _adapter_file(self) -> Mapping[str, Table]:
        """Write the adapter as a GGUF file, and return the table of that file."""
        config = self.weights.config
        with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
            path = Path(folder) / "adapter.gguf"
            write_lora_gguf(self.golden.adapter_for(config), path, config)
            return {"lora_gguf": gguf_table(path)}

    def comparisons(self, made: TrainingOutput) -> Iterator[Comparison]:
        """Compare each result of the learner with its expectation, and each file with its golden."""
        for expectation in self.expectations:
            actual = made.arrays[expectation.mode].get(expectation.stage_ref)
            yield judge_with_arrays(expectation, actual, model=self.model, backend=BACKEND)
        for kind, table in made.tables.items():
            yield replace(file_row(self.model, kind, table, self.golden.files[kind]), backend=BACKEND)

    def explained(self, theirs: TrainingOutput, mistake: Mistake[Any]) -> Cause | None:
        """Return a known mistake if llorch's code with it gives the same results everywhere; else None.

        A run that also has `mistake.along`, the fault that mostly comes with this mistake, counts as well.
        """
        runs = (self.made(injected(mistake, along=along)) for along in {False, mistake.along is not None})
        left = min(self._left(theirs, run) for run in runs)
        return Cause(mistake.name, "mistake", mistake.diagnosis, mistake.stages, 1.0, left) if left <= 1 else None

    def _left(self, theirs: TrainingOutput, ours: TrainingOutput) -> float:
        """Return the largest difference between two outputs, as a multiple of its tolerance."""
        if theirs.tables != ours.tables:
            return np.inf
        most = 0.0
        for expectation in self.expectations:
            actual, made = (found.arrays[expectation.mode].get(expectation.stage_ref) for found in (theirs, ours))
            if actual is None or made is None:
                continue
            apart, error = expectation.difference(actual, made), expectation.difference(actual).error
            most = max(most, min(apart.over(expectation.tolerance), times_over(apart.error, ROUNDING * error)))
        return most


def _is_brief(expectation: Expectation) -> bool:
    """Tell if a check of the lesson alone compares this expectation."""
    stage_ref = expectation.stage_ref
    return expectation.mode == ISOLATED or stage_ref.checkpoint == "19" or stage_ref.stage == "merged_logits"


def _shortened(expectation: Expectation) -> Expectation:
    """Cut the expectation of a loss curve to its first steps."""
    if expectation.stage_ref.checkpoint != "19" or expectation.reference is None:
        return expectation
    return replace(
        expectation, expected=expectation.expected[:FIRST_STEPS], reference=expectation.reference[:FIRST_STEPS]
    )
