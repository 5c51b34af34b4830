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

    def judged(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[LessonComparison]:
        """See `Check`."""
        for part in written_parts(lesson, implementation):
            kind, (blocks, values) = _block_type(part), _golden(part)
            ours = _decoded(part, implementation, blocks)
            row = replace(decode_row(kind, ours, values), backend=BACKEND)
            yield LessonComparison(row, None, ours, part=part.name)

    def suspects(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[LessonComparison]
    ) -> Sequence[Suspect]:
        """Return known mistakes that make the learner's numbers of ordinary blocks."""
        part = PARTS[wrong[0].part]
        blocks, values = (each[:ORDINARY] for each in _golden(part))
        ours = _decoded(part, implementation, blocks)
        inputs = QuantisedInputs(_block_type(part), blocks, values.shape, np.empty((0, 0), np.float32))
        return [
            Suspect(mistake.name, mistake.diagnosis, ("decode",), 1.0, 0.0)
            for mistake, made in quantised_variants("decode", inputs).wrong
            if np.array_equal(ours, made, equal_nan=True)
        ]


def _block_type(part: Exercise) -> GGMLType:
    return GGMLType[part.name.upper()]


def _golden(part: Exercise) -> tuple[np.ndarray, np.ndarray]:
    arrays = golden().blocks
    return arrays[f"{_block_type(part).name}.blocks"], arrays[f"{_block_type(part).name}.values"]


def _decoded(part: Exercise, implementation: Implementation, blocks: np.ndarray) -> np.ndarray:
    with implementation.installed([part]):
        return decode(blocks, _block_type(part), (len(blocks), 32))
