"""Parts of lesson 13: two types of blocks, from the bytes of a file to numbers."""

from collections.abc import Callable

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.files.blocks import SCRATCH_BYTES, Chunk, Decoder
from llorch.files.blocks.uniform import decode_q4_0 as our_q4_0
from llorch.files.blocks.uniform import decode_q8_0 as our_q8_0

ELEMENTS = 32  # of a block


def _reference_of(decode: Decoder) -> Callable[[np.ndarray], np.ndarray]:
    def reference(blocks: np.ndarray) -> np.ndarray:
        values = np.empty((len(blocks), ELEMENTS), np.float32)
        decode(Chunk(blocks, np.empty(values.size * SCRATCH_BYTES, np.uint8)), values)
        return values

    return reference


def _into(call: Call, right: Call) -> Call:
    def adapted(chunk: Chunk, out: np.ndarray) -> None:
        out[...] = call(blocks=chunk.blocks)

    return adapted


Q8_0 = Exercise(
    name="q8_0", reference=_reference_of(our_q8_0), returns=("values",), adapt=_into,
    replaces="llorch.files.blocks.uniform.decode_q8_0",
)  # fmt: skip
Q4_0 = Exercise(
    name="q4_0", reference=_reference_of(our_q4_0), returns=("values",), adapt=_into,
    replaces="llorch.files.blocks.uniform.decode_q4_0",
)  # fmt: skip
