"""Lessons of files. 00: a number format, a tensor table, token ids and embedding rows; 13: quantised blocks.

The gguf package's table of each built-in file, llama.cpp's ids of six texts and the blocks that ggml's own C decodes
are among the goldens; what the package makes of all finite bfloat16 numbers is asked for here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cache, partial

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from llorch.apps.learn.checks.forward import BACKEND, ForwardCheck, parts_so_far, written_parts
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.exercises.foundation import BFLOAT16, MERGE, TENSOR_TABLE
from llorch.apps.learn.judging import Mode, PartComparison
from llorch.apps.learn.lessons import PARTS, Lesson
from llorch.diagnosis.mistakes import QuantisedInputs
from llorch.diagnosis.mistakes.variants import quantised_variants
from llorch.files.blocks import uniform
from llorch.files.gguf import GGUFFile
from llorch.files.quant import GGMLType, decode
from llorch.judging.compare import compare_exact
from llorch.judging.expectations.files import foundation_rows, own_tensors, token_rows
from llorch.judging.expectations.quantised import decode_row
from llorch.judging.goldens.quantised import FOLDER, QuantisedGolden, read
from llorch.judging.types import Cause, Comparison
from llorch.judging.verify import stored
from llorch.model.model import Model
from llorch.runtime.builtin import BUILTIN, builtin_path, goldens_folder, held
from llorch.stages.stage_ref import StageRef

ONE = 0x3F80  # the bfloat16 that everyone knows
Install = Callable[[], AbstractContextManager[None]]


class FoundationCheck:
    """See `Check`."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """See `Check`."""
        for exercise, comparisons in {BFLOAT16: numbers, TENSOR_TABLE: tables, MERGE: texts}.items():
            if exercise in written_parts(lesson, implementation):
                together = parts_so_far(lesson, implementation) if mode == "chained" else [exercise]
                yield from (("", c) for c in comparisons(partial(implementation.installed, together)))
        yield from ForwardCheck().comparisons(lesson, implementation, mode)

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """See `Check`; the library knows those of the embedding."""
        return ForwardCheck().find_causes(
            lesson, implementation, mode, [(part, c) for part, c in wrong if c.expectation]
        )


def numbers(installed: Install) -> Iterator[Comparison]:
    """Compare every finite bfloat16 with the gguf package."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]  # without infinities and those that are no number
    ours = np.empty(bits.shape, np.float32)
    with installed():
        uniform.widen_bfloat16(bits, ours)
    theirs = dequantize(bits.view(np.uint8), GGMLQuantizationType.BF16)
    wrong = np.flatnonzero(ours.view(np.uint32) != theirs.view(np.uint32))
    shown = ONE if ONE in wrong else wrong[0] if wrong.size else 0
    note = f"{bits[shown]:#06x} is {theirs[shown]:g}, got {ours[shown]:g}" if wrong.size else ""
    yield compare_exact(
        StageRef("00", "bfloat16"), "gguf", wrong.size / bits.size, note, model="numbers", backend=BACKEND
    )


def tables(installed: Install) -> Iterator[Comparison]:
    """Compare the tensor table of every built-in file, with the hash of the bytes that it points to."""
    for model in held(BUILTIN):
        with installed():
            file = GGUFFile(builtin_path(model))
        with closing(file):
            yield from foundation_rows(model, own_tensors(file), stored(model)[1].tensors, backend=BACKEND)


def texts(installed: Install) -> Iterator[Comparison]:
    """Compare the ids of the goldens' texts, with every built-in vocabulary."""
    for model in held(BUILTIN):
        weights, golden = stored(model)
        with installed():
            encode = Model(weights).tokenizer.encode
            ids = {check.text: encode(check.text) for check in golden.tokens}
        yield from token_rows(model, ids.__getitem__, golden.tokens, backend=BACKEND)


ORDINARY = 4  # blocks before those with edge cases, of which several mistakes make the same


@cache
def golden() -> QuantisedGolden:
    """Read the goldens of quantised blocks, once for the process."""
    return read(goldens_folder() / FOLDER)


class BlocksCheck:
    """See `Check`. A part reads what no other part has made: chained is no other way."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[PartComparison]:
        """See `Check`."""
        for exercise in written_parts(lesson, implementation):
            kind, (blocks, values) = _block_type(exercise), _golden(exercise)
            ours = _decoded(exercise, implementation, blocks)
            yield exercise.name, replace(decode_row(kind, ours, values), backend=BACKEND, actual=ours)

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[PartComparison]
    ) -> Sequence[Cause]:
        """Return known mistakes that make the learner's numbers of ordinary blocks."""
        exercise = PARTS[wrong[0][0]]
        blocks, values = (each[:ORDINARY] for each in _golden(exercise))
        ours = _decoded(exercise, implementation, blocks)
        inputs = QuantisedInputs(_block_type(exercise), blocks, values.shape, np.empty((0, 0), np.float32))
        return [
            Cause(mistake.name, "mistake", mistake.diagnosis, ("decode",), 1.0, 0.0)
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
