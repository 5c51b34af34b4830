"""Checks of lessons on files. 00: a number format, a tensor table, token ids and embedding; 13: quantised blocks.

The goldens hold the gguf package's table of each built-in file, llama.cpp's ids of six texts, and blocks decoded by
ggml's C code. Only the bfloat16 numbers are computed here, by the gguf package.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cache, partial

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from llorch.apps.learn.checks.forward import BACKEND, ForwardCheck, exercises_so_far, list_written
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.exercises.foundation import BFLOAT16, MERGE, TENSOR_TABLE
from llorch.apps.learn.judging import Mode, NamedComparison
from llorch.apps.learn.lessons import PARTS, Lesson
from llorch.diagnosis.mistakes import QuantisedInputs
from llorch.diagnosis.mistakes.variants import quantised_variants
from llorch.files.blocks import uniform
from llorch.files.gguf import GGUFFile
from llorch.files.quant import GGMLType, decode
from llorch.judging.compare import compare_exact
from llorch.judging.expectations.files import compare_tensors, compare_tokens, llorch_tensors
from llorch.judging.expectations.quantised import decode_row
from llorch.judging.goldens.quantised import FOLDER, QuantisedGolden, read
from llorch.judging.types import Cause, Comparison
from llorch.judging.verify import stored
from llorch.model.model import Model
from llorch.runtime.builtin import BUILTIN, builtin_path, goldens_folder, models_with_goldens
from llorch.stages.stage_ref import StageRef

BFLOAT16_ONE = 0x3F80  # bits of 1.0, the clearest example of an error
Install = Callable[[], AbstractContextManager[None]]  # the learner's functions, for a `with` block


class FoundationCheck:
    """Check of lesson 00, see `Check`."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        for exercise, compare in {BFLOAT16: compare_bfloat16, TENSOR_TABLE: compare_tables, MERGE: compare_ids}.items():
            if exercise in list_written(lesson, implementation):
                exercises = exercises_so_far(lesson, implementation) if mode == "chained" else [exercise]
                yield from (("", c) for c in compare(partial(implementation.installed, exercises)))
        yield from ForwardCheck().comparisons(lesson, implementation, mode)

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """See `Check`; of this lesson, only the embedding has known mistakes."""
        return ForwardCheck().find_causes(
            lesson, implementation, mode, [(exercise_name, c) for exercise_name, c in wrong if c.expectation]
        )


def compare_bfloat16(installed: Install) -> Iterator[Comparison]:
    """Compare every finite bfloat16 number with the gguf package."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]  # without infinities and NaN
    actual = np.empty(bits.shape, np.float32)
    with installed():
        uniform.widen_bfloat16(bits, actual)
    expected = dequantize(bits.view(np.uint8), GGMLQuantizationType.BF16)
    wrong = np.flatnonzero(actual.view(np.uint32) != expected.view(np.uint32))
    example = BFLOAT16_ONE if BFLOAT16_ONE in wrong else wrong[0] if wrong.size else 0
    note = f"{bits[example]:#06x} is {expected[example]:g}, got {actual[example]:g}" if wrong.size else ""
    yield compare_exact(
        StageRef("00", "bfloat16"), "gguf", wrong.size / bits.size, note, model="numbers", backend=BACKEND
    )


def compare_tables(installed: Install) -> Iterator[Comparison]:
    """Compare the tensor table of every built-in file, and the hashes of the bytes that it points to."""
    for model in models_with_goldens(BUILTIN):
        with installed():
            file = GGUFFile(builtin_path(model))
        with closing(file):
            yield from compare_tensors(model, llorch_tensors(file), stored(model)[1].tensors, backend=BACKEND)


def compare_ids(installed: Install) -> Iterator[Comparison]:
    """Compare the token ids of the goldens' texts, for every built-in vocabulary."""
    for model in models_with_goldens(BUILTIN):
        weights, golden = stored(model)
        with installed():
            encode = Model(weights).tokenizer.encode
            ids = {check.text: encode(check.text) for check in golden.tokens}
        yield from compare_tokens(model, ids.__getitem__, golden.tokens, backend=BACKEND)


N_ORDINARY = 4  # blocks before the edge cases; on an edge case several mistakes give equal results


@cache
def quantised_golden() -> QuantisedGolden:
    """Read the goldens of quantised blocks, once for the process."""
    return read(goldens_folder() / FOLDER)


class BlocksCheck:
    """Check of lesson 13, see `Check`. No exercise reads another's results, so chained mode equals isolated mode."""

    def comparisons(self, lesson: Lesson, implementation: Implementation, mode: Mode) -> Iterator[NamedComparison]:
        """See `Check`."""
        for exercise in list_written(lesson, implementation):
            kind, (blocks, expected) = _block_type(exercise), _golden_blocks(exercise)
            actual = _decode_with(exercise, implementation, blocks)
            yield exercise.name, replace(decode_row(kind, actual, expected), backend=BACKEND, actual=actual)

    def find_causes(
        self, lesson: Lesson, implementation: Implementation, mode: Mode, wrong: Sequence[NamedComparison]
    ) -> Sequence[Cause]:
        """Return the known mistakes that reproduce the learner's numbers of the first failed exercise, bit for bit."""
        exercise = PARTS[wrong[0][0]]
        blocks, expected = (array[:N_ORDINARY] for array in _golden_blocks(exercise))
        actual = _decode_with(exercise, implementation, blocks)
        inputs = QuantisedInputs(_block_type(exercise), blocks, expected.shape, np.empty((0, 0), np.float32))
        return [
            Cause(mistake.name, "mistake", mistake.diagnosis, ("decode",), 1.0, 0.0)
            for mistake, reproduced in quantised_variants("decode", inputs).wrong
            if np.array_equal(actual, reproduced, equal_nan=True)
        ]


def _block_type(exercise: Exercise) -> GGMLType:
    return GGMLType[exercise.name.upper()]


def _golden_blocks(exercise: Exercise) -> tuple[np.ndarray, np.ndarray]:
    arrays = quantised_golden().blocks
    return arrays[f"{_block_type(exercise).name}.blocks"], arrays[f"{_block_type(exercise).name}.values"]


def _decode_with(exercise: Exercise, implementation: Implementation, blocks: np.ndarray) -> np.ndarray:
    with implementation.installed([exercise]):
        return decode(blocks, _block_type(exercise), (len(blocks), 32))
