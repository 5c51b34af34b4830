"""Arrays of a dump by the names of the engine that wrote them, not interpreted yet.

An array may be a range of bytes in a larger file (`Stored`), which is mapped when the array is read.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llorch.engines.dumps.stage_dump import INT8_CACHES, Features
from llorch.files.mapped import MappedFile
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import Tokens


@dataclass(frozen=True)
class RawArray:
    """One array of a dump.

    Attributes:
        name: Name by the engine, which may include the layer.
        stored: Dtype in the dump, `float32`, `bfloat16` ...
        shape: Shape in the dump.
        read: Function that returns the array; bfloat16 becomes float32 of the same values.
        layer: Layer that is declared separately from the name, or None.
        tokens: Indices of the tokens of the pass that the array has; None if not declared.
        axes: Declared names of the axes, of `Stage.axes` or `batch`; empty if not declared.
        op: Operation that computed the array, if declared (`MUL_MAT` of ggml).
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
class BatchPass:
    """Pass of several rows at once.

    Attributes:
        ids: Token ids of each row, with its padding.
        masks: For each row, 1 for a token and 0 for padding.
        first_position: Position of the first token of each row in the first pass.
    """

    ids: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    first_position: int = 0

    @property
    def is_ragged(self) -> bool:
        """True if rows have different lengths, so that arrays join their tokens."""
        return len({len(row) for row in self.ids}) > 1


@dataclass(frozen=True)
class RawDump:
    """Dump whose names are not mapped to stages yet.

    Attributes:
        source: Path or name of the dump, for messages.
        arrays: (pass number, array), in the order of writing; a pass is one call of the engine's forward.
        passes: Tokens of the passes; empty if not declared.
        features: Declared arithmetic of the engine.
        weights: `digest` of decoded weights, by the engine's names.
        notes: Defects of the dump that llorch worked around, one sentence each.
        batch: Passes of a batch, in place of `passes`; see `batch`.
    """

    source: str
    arrays: tuple[tuple[int, RawArray], ...]
    passes: tuple[Tokens, ...] = ()
    features: Features = field(default_factory=Features)
    weights: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    batch: tuple[BatchPass, ...] = ()


def digest(array: np.ndarray) -> str:
    """Hash an array as float32 with SHA-256: little-endian, in the order of its axes, the last one fastest."""
    return hashlib.sha256(np.ascontiguousarray(array, "<f4").data).hexdigest()


def with_earlier_pass(raw: RawDump, ids: Sequence[int] | None) -> RawDump:
    """Insert a pass without arrays for the tokens before the first dumped pass; `ids` are those of the whole text.

    Return the dump unchanged if its first pass starts at position 0, or if `ids` do not match.
    """
    dumped_ids = [token for tokens in raw.passes for token in tokens.ids]
    n_earlier = len(ids or ()) - len(dumped_ids)
    if not ids or n_earlier < 1 or not dumped_ids:
        return raw
    if raw.passes[0].first_position != n_earlier or [*ids[n_earlier:]] != dumped_ids:
        return raw
    arrays = tuple((number + 1, array) for number, array in raw.arrays)
    return replace(raw, arrays=arrays, passes=(Tokens(tuple(ids[:n_earlier])), *raw.passes))


MAX_DIMS = 8
_NUMPY = {  # NumPy has no bfloat16: its bits are read as integers
    "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8", "int32": "<i4", "int64": "<i8",
    "uint32": "<u4",
}  # fmt: skip
# i8 and f8 may mean eight bits or eight bytes, so only NumPy's spelling with a byte order sign is accepted.
_SPELLINGS = {
    "float32": "f32 fp32 float single <f4", "float16": "f16 fp16 half <f2", "bfloat16": "bf16",
    "float64": "f64 fp64 double <f8", "int32": "i32 <i4", "int64": "i64 <i8", "uint32": "u32 <u4",
}  # fmt: skip
DTYPES: Mapping[str, str] = {word: name for name in _NUMPY for word in (name, *_SPELLINGS[name].split())}


def known_dtype(text: str) -> str | None:
    """Translate a spelling of a dtype, `F32`, `torch.float32` or `<f4`, to `float32`; None if unknown."""
    return DTYPES.get(text.lower().rpartition(".")[2])


def float_type(fields: Fields, key: str) -> str:
    """Read the float dtype of an engine, or of its KV cache; empty if not declared, FormatError if unknown."""
    text = fields.text(key, default="")
    if key == "kv_cache" and text in (*INT8_CACHES, "int8"):
        return text if text in INT8_CACHES else "int8-row"  # the usual scale: one for each token and head
    dtype = known_dtype(text) if text else ""
    if dtype is None or "int" in dtype:
        integers = f", {', '.join(INT8_CACHES)}" if key == "kv_cache" else ""
        raise fields.error("Unsupported", key, f"float32, float16, bfloat16, float64{integers}", text)
    return dtype


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
        """Number of bytes of an element."""
        return np.dtype(_NUMPY[self.dtype]).itemsize

    @property
    def end(self) -> int:
        """Offset after the last element."""
        if self.strides is None:
            return self.offset + math.prod(self.shape) * self.itemsize
        steps = ((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + sum(steps) + self.itemsize

    @property
    def overlaps(self) -> bool:
        """True if elements may share bytes, as with a stride of 0: else the array is never larger than its file."""
        inner = self.itemsize
        pairs = zip(self.strides or (), self.shape, strict=self.strides is not None)
        for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
            if stride < inner:
                return True
            inner += (size - 1) * stride
        return False

    def read(self) -> np.ndarray:
        """Read the array: a view of the mapped file if it is contiguous, else a copy; bfloat16 becomes float32.

        Raise FormatError Truncated if the file has become shorter.
        """
        file = MappedFile(self.path)
        if self.end > file.size:
            raise file.error("Truncated", f"an array ends at byte {self.end}, the file ends at byte {file.size}")
        raw = file.view(0, file.size)
        return as_numbers(np.ndarray(self.shape, _NUMPY[self.dtype], raw.data, self.offset, self.strides), self.dtype)


def as_numbers(array: np.ndarray, dtype: str) -> np.ndarray:
    """Make an array contiguous and aligned; convert the bits of bfloat16 to float32 of the same values."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.require(array, requirements=["C", "A"])


def from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Build a contiguous array from exactly its bytes; bfloat16 becomes float32."""
    return as_numbers(np.frombuffer(data, _NUMPY[dtype]).reshape(shape), dtype)


def require_dtype(text: str, name: str, path: str | Path) -> str:
    """Return a dtype name like `known_dtype`; raise FormatError DType if the dtype is unknown."""
    if (dtype := known_dtype(text)) is None:
        message = f"{name} has the dtype {text[:40]!r}, expected {', '.join(_NUMPY)}, little-endian; save float32"
        raise FormatError("DType", message, path=path)
    return dtype


def require_shape(shape: tuple[int, ...], name: str, path: str | Path) -> None:
    """Raise FormatError (Malformed, TooLarge) for shapes that no array of a model has, before sizes are computed."""
    if len(shape) > MAX_DIMS or 0 in shape:
        message = f"{name} must have at most {MAX_DIMS} axes and no axis of size 0, got the shape {list(shape)!r:.80}"
        raise FormatError("Malformed", message, path=path)
    if math.prod(shape) >= 2**60:
        raise FormatError("TooLarge", f"{name} has the shape {list(shape)!r:.80}, more than 2^60 elements", path=path)


def require_name(name: str, path: str | Path) -> str:
    """Return a name; raise FormatError Malformed if it would be harmful in messages."""
    if not name or not name.isprintable() or len(name) > 200:
        raise FormatError("Malformed", f"a name must be 1 to 200 printable characters, got {name[:80]!r}", path=path)
    return name
