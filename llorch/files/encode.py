"""Float32 to the tensor types of ggml, byte for byte as ggml's own quantisers write them.

The blocks are made by the gguf package. It differs from ggml in one thing, the sign of a scale or minimum that is zero,
which is mended here.

Source: ggml src/ggml-quants.c, `quantize_row_*_ref`, through `ggml_quantize_chunk` of libggml 0.25.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.runtime.errors import FormatError

_ELEMENTS_AT_ONCE = 1 << 18  # encoded in one go, so that memory does not grow with the tensor
_FLOAT16, _BFLOAT16, _FLOAT32 = 65504.0, float.fromhex("0x1.fep127"), float(np.finfo(np.float32).max)

# What can be written, and the largest magnitude that each type holds: where the scale of a block is a float16, its
# multiple. Larger numbers would become infinite.
LARGEST: dict[GGMLType, float] = {
    GGMLType.F32: _FLOAT32, GGMLType.F16: _FLOAT16, GGMLType.BF16: _BFLOAT16, GGMLType.Q8_0: 127 * _FLOAT16,
    GGMLType.Q4_0: 8 * _FLOAT16, GGMLType.Q4_1: _FLOAT16, GGMLType.Q5_0: 16 * _FLOAT16, GGMLType.Q5_1: _FLOAT16,
    GGMLType.TQ1_0: _FLOAT16, GGMLType.TQ2_0: _FLOAT16, GGMLType.MXFP4: _FLOAT32,
}  # fmt: skip


def encoded_size(shape: tuple[int, ...], ggml_type: GGMLType) -> int:
    """Return the bytes of an encoded tensor, whose last axis is a whole number of blocks, without padding."""
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    return int(np.prod(shape)) // block_size * block_bytes


def encode(values: np.ndarray, ggml_type: GGMLType, *, name: str, path: Path) -> Iterator[np.ndarray]:
    """Encode a finite float32 tensor, part by part, in a type of `LARGEST`; OutOfRange for what it cannot hold."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    for start in range(0, flat.size, _ELEMENTS_AT_ONCE):
        part = flat[start : start + _ELEMENTS_AT_ONCE]
        largest = float(np.abs(part).max())
        if largest > LARGEST[ggml_type]:
            limit = f"{LARGEST[ggml_type]:.6g} in magnitude, the limit of {ggml_type.name}"
            message = f"{name}: expected at most {limit}, got {largest:.6g}; convert to BF16 or F32"
            raise FormatError("OutOfRange", message, path=path)
        yield _encode_part(part, ggml_type)


def _encode_part(part: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    if ggml_type is GGMLType.F32:
        return part.astype("<f4", copy=False).view(np.uint8)
    if ggml_type is GGMLType.F16:
        return part.astype("<f2").view(np.uint8)
    if ggml_type in (GGMLType.Q4_0, GGMLType.Q5_0):
        part = part + np.float32(0)  # -0.0 becomes 0.0: ggml starts its search for the largest number there
    if ggml_type in (GGMLType.Q4_1, GGMLType.Q5_1):
        part = _zeros_like_the_first(part, BLOCK_SIZES[ggml_type][0])
    with np.errstate(all="ignore"):  # 1 / scale of tiny blocks is infinite in C too
        # As one long row: the package loops in Python over every 16 rows.
        return quantize(part.reshape(1, -1), GGMLQuantizationType(ggml_type)).reshape(-1).view(np.uint8)


def _zeros_like_the_first(part: np.ndarray, block_size: int) -> np.ndarray:
    """Give all zeros of a block the sign of its first: ggml keeps the first of equal minima, NumPy any of them."""
    blocks = part.reshape(-1, block_size)
    first = np.take_along_axis(blocks, (blocks != 0).argmin(axis=1)[:, None], axis=1)  # of no zero: never used
    return np.where(blocks == 0, first, blocks)
