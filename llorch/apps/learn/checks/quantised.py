"""Lesson 13: blocks as ggml's own C decodes them, bit by bit: random ones and edge cases, from the goldens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from llorch.apps.learn.checks.forward import BACKEND, written_parts
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.implementation import Implementation
from llorch.apps.learn.judging import LessonComparison, Mode
from llorch.apps.learn.lessons import PARTS, Lesson
from llorch.diagnosis.mistakes import QuantisedInputs
from llorch.diagnosis.mistakes.variants import quantised_variants
from llorch.diagnosis.verdict import Suspect
from llorch.files.quant import GGMLType, decode
from llorch.judging.expectations.quantised import decode_row
from llorch.judging.goldens.quantised import FOLDER, QuantisedGolden, read
from llorch.runtime.builtin import goldens_folder

ORDINARY = 4  # blocks before those with edge cases, of which several mistakes make the same


@cache
def golden() -> QuantisedGolden:
    """Read the goldens of quantised blocks, once for the process."""
    return read(goldens_folder() / FOLDER)


class BlocksCheck:
    """See `Check`. A part reads what no other part has made: chained is no other way."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[LessonComparison]:
        """See `Check`."""
        for exercise in written_parts(lesson, implementation):
            kind, (blocks, values) = _block_type(exercise), _golden(exercise)
            ours = _decoded(exercise, implementation, blocks)
            comparison = replace(decode_row(kind, ours, values), backend=BACKEND)
            yield LessonComparison(comparison, None, ours, part=exercise.name)

    def suspects(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[LessonComparison]
    ) -> Sequence[Suspect]:
        """Return known mistakes that make the learner's numbers of ordinary blocks."""
        exercise = PARTS[wrong[0].part]
        blocks, values = (each[:ORDINARY] for each in _golden(exercise))
        ours = _decoded(exercise, implementation, blocks)
        inputs = QuantisedInputs(_block_type(exercise), blocks, values.shape, np.empty((0, 0), np.float32))
        return [
            Suspect(mistake.name, mistake.diagnosis, ("decode",), 1.0, 0.0)
            for mistake, made in quantised_variants("decode", inputs).wrong
            if np.array_equal(ours, made, equal_nan=True)
        ]


def _block_type(exercise: Exercise) -> GGMLType:
    return GGMLType[exercise.name.upper()]


def _golden(exercise: Exercise) -> tuple[np.ndarray, np.ndarray]:
    arrays = golden().blocks
    return arrays[f"{_block_type(exercise).name}.blocks"], arrays[f"{_block_type(exercise).name}.values"]


def _decoded(exercise: Exercise, implementation: Implementation, blocks: np.ndarray) -> np.ndarray:
    with implementation.installed([exercise]):
        return decode(blocks, _block_type(exercise), (len(blocks), 32))
