"""Arrays as they lie in a dump, under the names of the engine that wrote them; nothing is interpreted yet.

An array may be raw bytes in a file of others (`Stored`), mapped when it is read.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llorch.engines.dumps.stage_dump import Features
from llorch.files.mapped import MappedFile
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import Tokens


@dataclass(frozen=True)
class RawArray:
    """One array of a dump.

    Attributes:
        name: As the engine calls it, with the layer where that is a part of the name.
        stored: Its dtype, `float32`, `bfloat16` ...
        shape: As stored.
        read: Gives it; bfloat16 as float32 of the same values.
        layer: As declared beside the name, or None.
        tokens: Which tokens of the pass it has, counted from 0; None where nothing is said.
        axes: Names of its axes where they are declared, of `Stage.axes` or `batch`.
        op: The operation that made it, where the engine says so (`MUL_MAT` of ggml).
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    layer: int | None = None
    tokens: tuple[int, ...] | None = None
    axes: tuple[str, ...] = ()
    op: str = ""


@dataclass(frozen=True)
class RawDump:
    """A dump.

    Attributes:
        source: What it was read from, for messages.
        arrays: In the order they were written; each with the number of its pass.
        passes: Tokens of the passes; none where the dump does not say.
        features: What the engine says of itself.
        weights: `digest` of decoded tensors, by the engine's names.
        notes: What was found amiss and read around, one sentence each.
    """

    source: str
    arrays: tuple[tuple[int, RawArray], ...]
    passes: tuple[Tokens, ...] = ()
    features: Features = field(default_factory=Features)
    weights: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def digest(array: np.ndarray) -> str:
    """Hash an array as float32 with SHA-256: little-endian, in the order of its axes, the last one fastest."""
    return hashlib.sha256(np.ascontiguousarray(array, "<f4").data).hexdigest()


def with_earlier(raw: RawDump, ids: Sequence[int] | None) -> RawDump:
    """Put the passes that a dump lacks before its own, as one without arrays, where `ids` are those of the whole text.

    A dump whose first pass begins behind position 0 lacks them. Any other dump stays as it is.
    """
    shown = [token for tokens in raw.passes for token in tokens.ids]
    n_earlier = len(ids or ()) - len(shown)
    if not ids or n_earlier < 1 or not shown:
        return raw
    if raw.passes[0].first_position != n_earlier or [*ids[n_earlier:]] != shown:
        return raw
    arrays = tuple((number + 1, array) for number, array in raw.arrays)
    return replace(raw, arrays=arrays, passes=(Tokens(tuple(ids[:n_earlier])), *raw.passes))


MAX_DIMS = 8
_NUMPY = {
    "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8", "int32": "<i4", "int64": "<i8",
    "uint32": "<u4",
}  # fmt: skip
# i8 and f8 are eight bits to some and eight bytes to others: only NumPy's own spelling, with its sign, is read.
_SPELLINGS = {
    "float32": "f32 fp32 float single <f4", "float16": "f16 fp16 half <f2", "bfloat16": "bf16",
    "float64": "f64 fp64 double <f8", "int32": "i32 <i4", "int64": "i64 <i8", "uint32": "u32 <u4",
}  # fmt: skip
DTYPES: Mapping[str, str] = {word: name for name in _NUMPY for word in (name, *_SPELLINGS[name].split())}


def known_dtype(text: str) -> str | None:
    """Translate a spelling of a dtype, `F32`, `torch.float32` or `<f4`, to `float32`; None if unknown."""
    return DTYPES.get(text.lower().rpartition(".")[2])


@dataclass(frozen=True)
class Stored:
    """Location of an array in a file.

    Attributes:
        path: Path of the file.
        offset: Offset of the first byte.
        dtype: Dtype name of `known_dtype`.
        shape: Shape, slowest axis first.
        strides: Stride of each axis in bytes; None if the array is contiguous.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(_NUMPY[self.dtype]).itemsize

    @property
    def end(self) -> int:
        """Byte behind the last element."""
        if self.strides is None:
            return self.offset + math.prod(self.shape) * self.itemsize
        steps = ((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + sum(steps) + self.itemsize

    @property
    def overlaps(self) -> bool:
        """True if two elements share bytes, as with a stride of 0.

        An array without overlaps is never larger than its file.
        """
        inner = self.itemsize
        pairs = zip(self.strides or (), self.shape, strict=self.strides is not None)
        for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
            if stride < inner:
                return True
            inner += (size - 1) * stride
        return False

    def read(self) -> np.ndarray:
        """Look at the array: a view of the map where it lies in one piece, else a copy; bfloat16 as float32.

        FormatError Truncated where the file has become shorter.
        """
        file = MappedFile(self.path)
        if self.end > file.size:
            raise file.error("Truncated", f"an array ends at byte {self.end}, the file ends at byte {file.size}")
        raw = file.view(0, file.size)
        return as_numbers(np.ndarray(self.shape, _NUMPY[self.dtype], raw.data, self.offset, self.strides), self.dtype)


def as_numbers(array: np.ndarray, dtype: str) -> np.ndarray:
    """Make an array contiguous and aligned; the bits of bfloat16 become float32 of the same values."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.require(array, requirements=["C", "A"])


def from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Build an array from exactly its bytes."""
    return as_numbers(np.frombuffer(data, _NUMPY[dtype]).reshape(shape), dtype)


def require_dtype(text: str, name: str, path: str | Path) -> str:
    """Return a dtype name as `known_dtype` does; FormatError DType if there is none."""
    if (dtype := known_dtype(text)) is None:
        message = f"{name} has the dtype {text[:40]!r}, expected {', '.join(_NUMPY)}, little-endian; save float32"
        raise FormatError("DType", message, path=path)
    return dtype


def require_shape(shape: tuple[int, ...], name: str, path: str | Path) -> None:
    """Refuse (Malformed, TooLarge) shapes that no array of a model has."""
    if len(shape) > MAX_DIMS or 0 in shape:
        message = f"{name} must have at most {MAX_DIMS} axes and no axis of size 0, got the shape {list(shape)!r:.80}"
        raise FormatError("Malformed", message, path=path)
    if math.prod(shape) >= 2**60:
        raise FormatError("TooLarge", f"{name} has the shape {list(shape)!r:.80}, more than 2^60 elements", path=path)


def require_name(name: str, path: str | Path) -> str:
    """Refuse (Malformed) names that are harmful in messages."""
    if not name or not name.isprintable() or len(name) > 200:
        raise FormatError("Malformed", f"a name must be 1 to 200 printable characters, got {name[:80]!r}", path=path)
    return name
