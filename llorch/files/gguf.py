"""GGUF v2 and v3: the header is read and checked at opening, tensors are read on demand.

    magic "GGUF" | u32 version | u64 tensor count | u64 metadata count
    metadata entries | tensor table (name, dimensions fastest first, type, offset) | padding | tensor data

llorch has its own reader, because the reader of the gguf package trusts the declared lengths and offsets (it loops
endlessly on a 49-byte file) and takes seconds for a real vocabulary. Rule: never laxer than llama.cpp. Offsets must be
exactly the running sum of padded sizes, so no two names can share bytes.

Source: ggml docs/gguf.md; ggml src/gguf.cpp; llama.cpp src/llama-model-loader.cpp (models in several files).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGUFValueType

from llorch.files.foreign import HEAD, refuse_other_format
from llorch.files.mapped import Entry, MappedFile, TensorFile, note_once, on_error
from llorch.files.metadata import DEFAULT_LIMITS, Cursor, MetadataLimits, StringArray, Value, read_metadata
from llorch.files.packed import Packed
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.tensor_names import is_plain_name
from llorch.runtime.errors import FormatError

__all__ = ["GGUFFile", "MetadataLimits", "StringArray", "TensorInfo", "open_gguf"]

_LEAST_ALIGNMENT = 8  # the specification requires a multiple of it
_MAX_ELEMENTS = 2**63 - 1  # ggml counts elements in a signed 64-bit number

_PART, _N_PARTS, _N_TENSORS = "split.no", "split.count", "split.tensors.count"  # the first part has number 0
_MAX_PARTS = 99_999  # largest number in a file name
_INTEGERS = frozenset({GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64})  # types without floats


@dataclass(frozen=True, slots=True)
class TensorInfo(Entry):
    """Row of the tensor table; in the file the axes are reversed, fastest first."""

    ggml_type: GGMLType

    @property
    def holds_floats(self) -> bool:
        """True if the tensor can be a weight: floats or blocks, not integers."""
        return self.ggml_type not in _INTEGERS


class GGUFFile(TensorFile[TensorInfo]):
    """Open GGUF file: metadata and tensor table in memory, tensors on demand."""

    def __init__(self, path: str | Path, *, limits: MetadataLimits = DEFAULT_LIMITS) -> None:
        """Read and check header, metadata and tensor table of a GGUF v2 or v3 file."""
        self._file = MappedFile(path)
        super().__init__(path, self._file)
        with on_error(self.close):
            cursor = Cursor(self._file, limits)
            self.version, n_tensors, self.metadata, self.alignment = read_head(cursor)
            self.tensors = self.stored = read_tensor_table(cursor, n_tensors, self.alignment)
            _check_end(cursor, self.tensors, self.alignment)

    def array(self, name: str) -> np.ndarray:
        """Read a tensor as float32, not checked for NaN: a view of the map for F32, else a decoded copy."""
        packed = self.packed(name)
        if packed.ggml_type is GGMLType.F32:
            return packed.raw.view("<f4").reshape(packed.shape)
        packed.require_scales()
        return packed.decode()

    def packed(self, name: str) -> Packed:
        """Return a stored tensor; FormatError DType for integer tensors, or as `raw`."""
        entry, raw = self.entry(name), self.raw(name)
        if not entry.holds_floats:
            raise self._file.error("DType", f"{name} must hold floats or blocks, got {entry.ggml_type.name}")
        return Packed(name, self.path, raw, entry.ggml_type, entry.shape)


class SplitGGUFFile(GGUFFile):
    """Open GGUF model in several files: metadata of the first file, tensors of all files."""

    def __init__(self, paths: Sequence[Path], *, limits: MetadataLimits = DEFAULT_LIMITS) -> None:
        """Open all parts in order; FormatError if a part does not belong to the model."""
        super().__init__(paths[0], limits=limits)
        with on_error(self.close):
            for number, path in enumerate(paths[1:], start=1):
                self._add(GGUFFile(path, limits=limits), number)
            n_tensors = self.metadata.get(_N_TENSORS, len(self.tensors))
            if not isinstance(n_tensors, int) or n_tensors != len(self.tensors):
                message = f"{_N_TENSORS}: expected {n_tensors} tensors in all parts, got {len(self.tensors)}"
                raise FormatError("Inconsistent", message, path=self.path)

    def _add(self, part: GGUFFile, number: int) -> None:
        self._files.append(part._file)
        actual = part.metadata.get(_PART, 0), part.metadata.get(_N_PARTS, 1)
        if not all(isinstance(n, int) for n in actual) or actual != (number, self.metadata[_N_PARTS]):
            message = f"{_PART}, {_N_PARTS}: expected {number}, {self.metadata[_N_PARTS]}, got {actual[0]}, {actual[1]}"
            raise FormatError("Inconsistent", message, path=part.path)
        if duplicates := sorted(part.tensors.keys() & self.tensors.keys()):
            raise FormatError("Duplicate", f"tensor {duplicates[0]!r} is in two parts", path=part.path)
        self.tensors = self.stored = {**self.tensors, **part.tensors}
        self._file_of |= dict.fromkeys(part.tensors, part._file)


def open_gguf(path: str | Path, *, limits: MetadataLimits = DEFAULT_LIMITS) -> GGUFFile:
    """Open a GGUF file, or a model in several files from the path of any file; usable in a `with` statement."""
    file = GGUFFile(path, limits=limits)
    with on_error(file.close):
        paths = _part_paths(file)
    if len(paths) == 1:
        return file
    file.close()
    return SplitGGUFFile(paths, limits=limits)


def _part_paths(file: GGUFFile) -> list[Path]:
    """Return the paths of all parts of a model, named `NAME-00002-of-00003.gguf` as `gguf-split` does."""
    n_parts, number = file.metadata.get(_N_PARTS, 1), file.metadata.get(_PART, 0)
    if not (isinstance(n_parts, int) and isinstance(number, int) and 0 <= number < max(n_parts, 1) <= _MAX_PARTS):
        message = f"{_PART}, {_N_PARTS}: expected a part number below the number of parts (at most {_MAX_PARTS})"
        raise FormatError("OutOfRange", f"{message}, got {number!r}, {n_parts!r}", path=file.path)
    if n_parts <= 1:
        return [file.path]
    suffix = "-{:05d}-of-{:05d}.gguf"
    name, expected_suffix = file.path.name, suffix.format(number + 1, n_parts)
    if not name.endswith(expected_suffix):
        message = f"part {number + 1} of {n_parts}: expected a file name that ends with {expected_suffix}, got {name}"
        raise FormatError("Inconsistent", f"{message}; rename the file", path=file.path)
    prefix = name.removesuffix(expected_suffix)
    paths = [file.path.with_name(prefix + suffix.format(part + 1, n_parts)) for part in range(n_parts)]
    if missing := [path.name for path in paths if not path.exists()]:
        message = f"the model has {n_parts} parts, and {len(missing)} are missing: {', '.join(missing[:4])}"
        raise FormatError("Missing", f"{message}; put all parts into one folder", path=file.path)
    return paths


def read_head(cursor: Cursor) -> tuple[int, int, dict[str, Value], int]:
    """Read the header before the tensor table: version, number of tensors, metadata, alignment."""
    version = _read_version(cursor)
    n_tensors = _read_count(cursor, "tensor", cursor.limits.tensors)
    n_entries = _read_count(cursor, "metadata entry", cursor.limits.metadata_entries)
    metadata, kinds = read_metadata(cursor, n_entries)
    return version, n_tensors, metadata, _alignment(cursor, metadata, kinds)


def _read_version(cursor: Cursor) -> int:
    head = cursor.file.map[:HEAD]
    if head[:4] != b"GGUF":
        refuse_other_format(head, "a GGUF file", cursor.file.path)
    magic = head[cursor.skip(4, "magic") : 4]  # `skip` raises for a shorter file, else returns 0
    if magic != b"GGUF":
        raise cursor.error("BadMagic", f"a GGUF file starts with b'GGUF', got {magic!r}", 0)
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        raise cursor.error("Unsupported", "expected a little-endian file, got a big-endian file", 4)
    if version not in (2, 3):
        raise cursor.error("Unsupported", f"expected GGUF version 2 or 3, got version {version}", 4)
    return version


def _read_count(cursor: Cursor, subject: str, limit: int) -> int:
    count = cursor.u64(f"{subject} count")
    if count > limit:
        raise cursor.error("TooLarge", f"{subject} count is {count}, at most {limit} are allowed", cursor.position - 8)
    return count


def _alignment(cursor: Cursor, metadata: dict[str, Value], kinds: dict[str, GGUFValueType]) -> int:
    key, limit = "general.alignment", cursor.limits.alignment
    alignment = metadata.get(key, 32)
    if kinds.get(key, GGUFValueType.UINT32) is not GGUFValueType.UINT32 or not isinstance(alignment, int):
        raise cursor.file.error("Malformed", f"{key} must be of type UINT32, got {kinds[key].name}")
    if not _LEAST_ALIGNMENT <= alignment <= limit or alignment & (alignment - 1):
        message = f"{key} must be a power of two from {_LEAST_ALIGNMENT} to {limit}, got {alignment}"
        raise cursor.file.error("Malformed", message)
    return alignment


def read_tensor_table(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Read the rows of `count` tensors by name; returned offsets count from the start of the file."""
    rows: dict[str, TensorInfo] = {}
    for index in range(count):
        row = _read_tensor_row(cursor, index)
        if row.name in rows:
            raise cursor.error("Duplicate", f"tensor name {row.name!r} occurs twice")
        rows[row.name] = row
    data_start = cursor.position + -cursor.position % alignment if count else cursor.position
    expected = 0  # the offset that the next tensor must have
    for name, row in rows.items():
        _check_range(cursor, row, data_start, expected)
        expected += row.n_bytes + -row.n_bytes % alignment
        rows[name] = replace(row, offset=data_start + row.offset)
    return rows


def _check_end(cursor: Cursor, tensors: Mapping[str, TensorInfo], alignment: int) -> None:
    """Warn of bytes after the last tensor; Malformed if they show that the data has a larger alignment."""
    file, header_end = cursor.file, cursor.position
    end = max((tensor.offset + tensor.n_bytes for tensor in tensors.values()), default=header_end)
    trailing = file.size - (end + -end % alignment)
    if trailing <= 0:
        return
    larger = 2 * alignment
    while tensors and larger <= cursor.limits.alignment:
        if _is_aligned_to(file, [*tensors.values()], header_end, end, larger):
            message = f"general.alignment: expected {larger}, to which the data is aligned, got {alignment}"
            raise file.error("Malformed", f"{message}; correct the key, or convert the model again")
        larger *= 2
    note_once(file.path, f"{trailing} bytes after the last tensor are not read")


def _is_aligned_to(file: MappedFile, tensors: Sequence[TensorInfo], header_end: int, end: int, alignment: int) -> bool:
    """Check if all data is shifted, as if its start had this larger alignment.

    Then zeros are at the declared start of the data, nonzero bytes after its declared end, and then only padding.
    """
    data_start = min(tensor.offset for tensor in tensors)
    shift = header_end + -header_end % alignment - data_start
    data = np.frombuffer(file.map, np.uint8)
    return (
        shift > 0
        and all((tensor.offset - data_start) % alignment == 0 for tensor in tensors)
        and not data[header_end : data_start + shift].any()
        and bool(data[end : end + shift].any())
        and 0 <= file.size - end - shift < alignment
        and not data[end + shift :].any()
    )


def _read_tensor_row(cursor: Cursor, index: int) -> TensorInfo:
    start = cursor.position
    name = cursor.text(f"name of tensor {index}", limit=cursor.limits.name_bytes, over_limit="Malformed")
    if not is_plain_name(name):
        raise cursor.error("Malformed", f"tensor name must be plain printable text, got {name!r}", start)
    n_dims = cursor.u32(f"dimension count of {name}")
    if not 1 <= n_dims <= cursor.limits.dimensions:
        raise cursor.error("Malformed", f"{name} must have 1..4 dimensions, got {n_dims}")
    dims = [cursor.u64(f"dimension {axis} of {name}") for axis in range(n_dims)]
    ggml_type = _read_type(cursor, name)
    n_bytes = _size_in_bytes(cursor, name, dims, ggml_type)
    offset = cursor.u64(f"offset of {name}")
    return TensorInfo(name, tuple(reversed(dims)), offset, n_bytes, ggml_type)


def _read_type(cursor: Cursor, name: str) -> GGMLType:
    number = cursor.u32(f"type of {name}")
    try:
        return GGMLType(number)
    except ValueError:
        message = f"{name} has ggml type {number}, which ggml does not define or has removed"
        raise cursor.error("Unsupported", message) from None


def _size_in_bytes(cursor: Cursor, name: str, dims: list[int], ggml_type: GGMLType) -> int:
    if any(not 0 < dim <= _MAX_ELEMENTS for dim in dims):
        raise cursor.error("Malformed", f"{name} must have dimensions of 1 or more, got {dims}")
    if prod(dims) > _MAX_ELEMENTS:
        raise cursor.error("TooLarge", f"{name} has dimensions {dims}, more than 2^63 - 1 elements")
    block_size, block_bytes = BLOCK_SIZES[ggml_type]
    if dims[0] % block_size:
        message = f"{name}: {ggml_type.name} needs rows of a multiple of {block_size} elements, got {dims[0]}"
        raise cursor.error("Malformed", message)
    return prod(dims) // block_size * block_bytes


def _check_range(cursor: Cursor, row: TensorInfo, data_start: int, expected: int) -> None:
    """Check that a tensor lies in the file, at the `expected` offset from the start of the data."""
    end = data_start + row.offset + row.n_bytes
    description = f"{row.name}: expected bytes {data_start + row.offset} to {end}"
    if end > cursor.limits.data_end:
        raise cursor.file.error("OutOfBounds", f"{description}, got a file of {cursor.file.size} bytes")
    if end > cursor.file.size:
        raise cursor.file.error("Truncated", f"{description}, got a file that ends at byte {cursor.file.size}")
    if row.offset != expected:
        message = f"{row.name} must have offset {expected} (no gap, no overlap, aligned), got {row.offset}"
        raise cursor.file.error("Malformed", message)
