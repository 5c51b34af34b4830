"""Tensor types of ggml: decoding to float32, and encoding byte for byte as in ggml's quantisers.

A quantised row is a sequence of blocks: a few bytes of scale, then small integers packed into bits. Common types are
decoded by `llorch.files.blocks`, others by the gguf package, with the same bits but slower. The gguf package encodes.
It differs from ggml only in the sign of a scale or minimum that is zero; this module corrects the sign.

Source: ggml src/ggml-quants.c, `quantize_row_*_ref`, through `ggml_quantize_chunk` of libggml 0.25.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from llorch.files.blocks import DECODERS, SCRATCH_BYTES, Chunk, Decoder
from llorch.files.blocks.super_blocks import minima_of_q2_k, minima_of_q4_k
from llorch.files.blocks.uniform import minima_of_block
from llorch.ops.compiled.products import KINDS, LARGE, RUN, CompiledMatrix, is_available
from llorch.ops.rounding import ActivationKind
from llorch.runtime.errors import FormatError

logger = logging.getLogger(__name__)

_ELEMENTS_AT_ONCE = 1 << 19  # decoded at once: enough to hide the cost of calls, small enough for the L3 cache
_thread_local = threading.local()


class GGMLType(IntEnum):
    """Tensor types of ggml, by their number in the file, without removed types."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


# Elements and bytes of one block. gguf 0.19 lacks Q2_0, and has two floats in Q8_1 where ggml has two halves.
BLOCK_SIZES: dict[int, tuple[int, int]] = {
    **GGML_QUANT_SIZES,
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}

# Type to which ggml's CPU backend rounds activations -> types of the weights.
_TYPES_BY_ACTIVATION: Mapping[ActivationKind, str] = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "Q8_0": "Q4_0 Q5_0 Q8_0 IQ4_NL MXFP4 NVFP4 Q1_0 Q2_0",
    "Q8_1": "Q4_1 Q5_1",
    "Q8_K": "Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_XS TQ1_0 TQ2_0",
}
ACTIVATION_TYPE: Mapping[GGMLType, ActivationKind] = MappingProxyType(
    {GGMLType[name]: kind for kind, names in _TYPES_BY_ACTIVATION.items() for name in names.split()}
)

MINIMA: Mapping[GGMLType, Callable[[Chunk], np.ndarray]] = {  # types that add a minimum, with its decoder
    GGMLType.Q4_1: minima_of_block,
    GGMLType.Q5_1: minima_of_block,
    GGMLType.Q2_K: minima_of_q2_k,
    GGMLType.Q4_K: minima_of_q4_k,
    GGMLType.Q5_K: minima_of_q4_k,
}


# Offsets in a block of its float16 scales and minima.
SCALE_OFFSETS: Mapping[GGMLType, tuple[int, ...]] = MappingProxyType({
    GGMLType.Q4_0: (0,), GGMLType.Q4_1: (0, 2), GGMLType.Q5_0: (0,), GGMLType.Q5_1: (0, 2), GGMLType.Q8_0: (0,),
    GGMLType.IQ4_NL: (0,), GGMLType.Q2_K: (80, 82), GGMLType.Q3_K: (108,), GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2), GGMLType.Q6_K: (208,), GGMLType.IQ4_XS: (0,), GGMLType.MXFP4: (),
})  # fmt: skip


def float_scales(raw: np.ndarray, ggml_type: GGMLType) -> Iterator[np.ndarray]:
    """Yield the scales and minima of all blocks as floats, for a type of `SCALE_OFFSETS`.

    Those of MXFP4 are the largest magnitudes of its blocks, which may exceed float32.
    """
    blocks = raw.reshape(-1, BLOCK_SIZES[ggml_type][1])
    for offset in SCALE_OFFSETS[ggml_type]:
        yield np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2")[:, 0]
    if ggml_type is GGMLType.MXFP4:
        with np.errstate(over="ignore"):
            yield np.ldexp(np.float32(12), blocks[:, 0].astype(np.int32) - 128)


def decode(raw: np.ndarray, ggml_type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Decode the bytes of a tensor to a new float32 array; the caller checks for infinity and NaN."""
    decoded = np.empty(shape, np.float32)
    decode_into(raw, ggml_type, decoded)
    return decoded


def decode_into(raw: np.ndarray, ggml_type: GGMLType, out: np.ndarray) -> None:
    """Decode into a contiguous float32 array, without new memory; ValueError for another array.

    A large array is decoded in C, to the same bits, if a compiler is installed.
    """
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    blocks = raw.reshape(-1, block_bytes)
    if not out.flags.c_contiguous or out.dtype != np.float32:
        raise ValueError(f"out must be a contiguous float32 array, got {out.dtype} with strides {out.strides}")
    if out.size != len(blocks) * block_size:
        raise ValueError(f"out must hold the {len(blocks) * block_size} elements, got room for {out.size}")
    is_compiled = ggml_type.name in KINDS and ggml_type is not GGMLType.F32 and out.shape[-1] % RUN == 0
    if is_compiled and out.size >= LARGE and is_available() and compiled_decoder_is_right(ggml_type):
        _decode_compiled_into(raw, ggml_type, out)
    else:
        decode_by_reference(raw, ggml_type, out)


def decode_compiled(raw: np.ndarray, ggml_type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Decode in C to a new float32 array, for a type that the library has and rows of whole runs."""
    decoded = np.empty(shape, np.float32)
    _decode_compiled_into(raw, ggml_type, decoded)
    return decoded


def _decode_compiled_into(raw: np.ndarray, ggml_type: GGMLType, out: np.ndarray) -> None:
    shape = out.size // out.shape[-1], out.shape[-1]
    rows = np.ascontiguousarray(raw).reshape(shape[0], -1)
    CompiledMatrix(ggml_type.name, shape, rows).decode_into(0, out.reshape(shape))


def decode_by_reference(raw: np.ndarray, ggml_type: GGMLType, out: np.ndarray) -> None:
    """Decode into a contiguous float32 array in NumPy, the reference of the compiled decoders."""
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    blocks, out_blocks = raw.reshape(-1, block_bytes), out.reshape(-1, block_size)
    decode_blocks = DECODERS.get(ggml_type.name) or _gguf_decoder(ggml_type)
    step = max(1, _ELEMENTS_AT_ONCE // block_size)
    scratch = _scratch()
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            chunk = Chunk(blocks[start : start + step], scratch)
            decode_blocks(chunk, out_blocks[start : start + step])


@cache
def compiled_decoder_is_right(ggml_type: GGMLType) -> bool:
    """Compare the compiled decoder of a type with the reference, on random blocks, once a process; warn if it differs.

    Only the bits of a NaN may differ.
    """
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    shape = 2, 32 * block_size * (RUN // min(block_size, RUN))
    raw = np.random.default_rng(0).integers(0, 256, shape[0] * shape[1] // block_size * block_bytes, dtype=np.uint8)
    expected, actual = np.empty(shape, np.float32), decode_compiled(raw, ggml_type, shape)
    decode_by_reference(raw, ggml_type, expected)
    is_equal = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    if not is_equal.all():
        logger.warning(
            "the compiled decoder of %s is wrong on this machine; NumPy decodes in its place", ggml_type.name
        )
    return bool(is_equal.all())


def decode_minima(raw: np.ndarray, ggml_type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Decode the minimum of every block, m of x = q * d + m, for a matrix of a type in `MINIMA`.

    Returns (out, blocks) float32; super-blocks have one minimum per sub-block.
    """
    blocks = raw.reshape(-1, BLOCK_SIZES[ggml_type][1])
    step = _ELEMENTS_AT_ONCE // BLOCK_SIZES[ggml_type][0]
    parts = [
        MINIMA[ggml_type](Chunk(blocks[start : start + step], _scratch())) for start in range(0, len(blocks), step)
    ]
    return np.concatenate(parts).reshape(shape[0], -1)


def has_bad_scale(raw: np.ndarray, ggml_type: GGMLType) -> bool:
    """Check for a block scale that is NaN in its format, but decodes to a finite number as in ggml.

    Other types store scales as floats, so a NaN scale appears in the decoded values.
    """
    blocks = raw.reshape(-1, BLOCK_SIZES[ggml_type][1])
    # E8M0: 255 is NaN. (NVFP4 has one too, which ggml defines as zero.)
    return ggml_type is GGMLType.MXFP4 and bool((blocks[:, 0] == 0xFF).any())


def _scratch() -> np.ndarray:
    """Return this thread's scratch memory; allocating it for each call would take as long as the decoding."""
    if not hasattr(_thread_local, "scratch"):
        _thread_local.scratch = np.empty(SCRATCH_BYTES * _ELEMENTS_AT_ONCE, np.uint8)
    return _thread_local.scratch


def _gguf_decoder(ggml_type: GGMLType) -> Decoder:
    gguf_type = GGMLQuantizationType(ggml_type)

    def decode_blocks(chunk: Chunk, out: np.ndarray) -> None:
        # One long row, because the package loops in Python over every 16 rows.
        out[...] = dequantize(chunk.blocks.reshape(1, -1), gguf_type).reshape(out.shape)

    return decode_blocks


_ENCODED_AT_ONCE = 1 << 18  # elements encoded at once, so that memory does not grow with the tensor
_FLOAT16, _BFLOAT16, _FLOAT32 = 65504.0, float.fromhex("0x1.fep127"), float(np.finfo(np.float32).max)

# Types that llorch writes, and the largest magnitude of each; for a float16 block scale, a multiple of its maximum.
# Larger numbers would become infinite.
LARGEST: dict[GGMLType, float] = {
    GGMLType.F32: _FLOAT32, GGMLType.F16: _FLOAT16, GGMLType.BF16: _BFLOAT16, GGMLType.Q8_0: 127 * _FLOAT16,
    GGMLType.Q4_0: 8 * _FLOAT16, GGMLType.Q4_1: _FLOAT16, GGMLType.Q5_0: 16 * _FLOAT16, GGMLType.Q5_1: _FLOAT16,
    GGMLType.TQ1_0: _FLOAT16, GGMLType.TQ2_0: _FLOAT16, GGMLType.MXFP4: _FLOAT32,
}  # fmt: skip


def encoded_size(shape: tuple[int, ...], ggml_type: GGMLType) -> int:
    """Return the bytes of an encoded tensor, without padding; its last axis is a multiple of the block size."""
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    return int(np.prod(shape)) // block_size * block_bytes


def encode(tensor: np.ndarray, ggml_type: GGMLType, *, name: str, path: Path) -> Iterator[np.ndarray]:
    """Encode a finite float32 tensor in chunks, in a type of `LARGEST`; OutOfRange for values above its maximum."""
    flat = np.ascontiguousarray(tensor, np.float32).reshape(-1)
    for start in range(0, flat.size, _ENCODED_AT_ONCE):
        chunk = flat[start : start + _ENCODED_AT_ONCE]
        largest = float(np.abs(chunk).max())
        if largest > LARGEST[ggml_type]:
            limit = f"{LARGEST[ggml_type]:.6g} in magnitude, the limit of {ggml_type.name}"
            message = f"{name}: expected at most {limit}, got {largest:.6g}; convert to BF16 or F32"
            raise FormatError("OutOfRange", message, path=path)
        yield _encode_chunk(chunk, ggml_type)


def _encode_chunk(chunk: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    if ggml_type is GGMLType.F32:
        return chunk.astype("<f4", copy=False).view(np.uint8)
    if ggml_type is GGMLType.F16:
        return chunk.astype("<f2").view(np.uint8)
    if ggml_type in (GGMLType.Q4_0, GGMLType.Q5_0):
        chunk = chunk + np.float32(0)  # -0.0 becomes 0.0, the start value of ggml's maximum search
    if ggml_type in (GGMLType.Q4_1, GGMLType.Q5_1):
        chunk = _sign_zeros(chunk, BLOCK_SIZES[ggml_type][0])
    with np.errstate(all="ignore"):  # as in C, 1 / scale of tiny blocks is infinite
        # One long row, because the package loops in Python over every 16 rows.
        return quantize(chunk.reshape(1, -1), GGMLQuantizationType(ggml_type)).reshape(-1).view(np.uint8)


def _sign_zeros(chunk: np.ndarray, block_size: int) -> np.ndarray:
    """Give all zeros of a block the sign of its first zero: ggml keeps the first of equal minima, NumPy any."""
    blocks = chunk.reshape(-1, block_size)
    first = np.take_along_axis(blocks, (blocks != 0).argmin(axis=1)[:, None], axis=1)  # unused without zeros
    return np.where(blocks == 0, first, blocks)
