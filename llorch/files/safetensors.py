"""Safetensors files: reader with header checks, whose arrays are views of the map, and writer.

    u64 header length | JSON {name: {dtype, shape, data_offsets}, "__metadata__": {...}} | data without holes

llorch checks the header itself, because the safetensors package accepts duplicate names (the last wins), unknown fields
and any name; its map crashes the process if the file is truncated; and its NumPy interface cannot read bfloat16. In
files that llorch writes (adapters, snapshots, traces) names can have slashes, integers and bytes keep their dtype, and
equal tensors give equal bytes.

Source: https://github.com/huggingface/safetensors (README and safetensors/src/tensor.rs).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from llorch.files.foreign import HEAD, refuse_other_format
from llorch.files.mapped import Entry, MappedFile, TensorFile, on_error
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.files.strict_json import parse_json
from llorch.files.tensor_names import is_plain_name
from llorch.runtime.errors import FormatError, UserError

# Bits per element of every dtype of the format.
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8}
_BITS |= {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
_FLOATS = {"F16": GGMLType.F16, "BF16": GGMLType.BF16, "F32": GGMLType.F32, "F64": GGMLType.F64}

_WRITTEN = {  # dtypes that llorch writes
    "F64": np.float64, "I64": np.int64, "F32": np.float32, "I32": np.int32, "F16": np.float16, "U8": np.uint8,
}  # fmt: skip
_CODES = {np.dtype(dtype): code for code, dtype in _WRITTEN.items()}
_MAX_HEADER = 25_000_000  # bytes
_MAX_TENSORS = 65_536
_MAX_DIMS = 8
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class SafetensorsInfo(Entry):
    """Header entry of one tensor."""

    dtype: str

    @property
    def holds_floats(self) -> bool:
        """True if the tensor can be a weight: floats, or a matrix of a quantised folder."""
        return self.dtype in _FLOATS or self.dtype not in _BITS


class SafetensorsTensors(TensorFile[SafetensorsInfo]):
    """Tensors of one or several safetensors files, read on demand."""

    def array(self, name: str) -> np.ndarray:
        """Read a tensor as float32: a view of the map for F32 (a copy at an odd address), else a converted copy."""
        packed = self.packed(name)
        if packed.ggml_type is GGMLType.F32:
            return np.require(packed.raw.view("<f4"), requirements="A").reshape(packed.shape)
        return packed.decode()

    def packed(self, name: str) -> Packed:
        """Return a stored tensor; FormatError DType unless it is F32, F16, BF16 or F64, or as `raw`."""
        entry, raw = self.entry(name), self.raw(name)
        if entry.dtype not in _FLOATS:
            message = f"{name} must be F32, F16, BF16 or F64, got {entry.dtype}"
            raise FormatError("DType", message, path=self.file_of(name))
        return Packed(name, self.file_of(name), raw, _FLOATS[entry.dtype], entry.shape)


class SafetensorsFile(SafetensorsTensors):
    """Open safetensors file: header in memory, tensors on demand."""

    def __init__(self, path: str | Path) -> None:
        """Read and check the header."""
        self._file = MappedFile(path)
        super().__init__(path, self._file)
        with on_error(self.close):
            header, data_start = _read_header(self._file)
            self.metadata = _read_metadata(self._file, header.pop("__metadata__", {}))
            self.tensors = self.stored = _read_tensors(self._file, header, data_start)


def open_safetensors(path: str | Path) -> SafetensorsFile:
    """Open a safetensors file; usable in a `with` statement."""
    return SafetensorsFile(path)


def _read_header(file: MappedFile) -> tuple[dict[str, object], int]:
    """Return the parsed header and the byte offset of the data."""
    length = int.from_bytes(file.map[:8], "little")
    if 8 + length > file.size:
        refuse_other_format(file.map[:HEAD], "a safetensors file", file.path)
    if file.size < 8:
        raise file.error("Truncated", f"a safetensors file has at least 8 bytes, got {file.size}", 0)
    if length > _MAX_HEADER:
        raise file.error("TooLarge", f"the header claims {length} bytes, at most {_MAX_HEADER} are read", 0)
    if 8 + length > file.size:
        raise file.error("Truncated", f"the header claims {length} bytes, the file has {file.size - 8} left", 0)
    text = file.map[8 : 8 + length]
    if text.count(b'"data_offsets"') > _MAX_TENSORS:  # before the slow parser
        raise file.error("TooLarge", f"the header has more than {_MAX_TENSORS} tensors", 8)
    header = parse_json(text, what="the header", path=file.path)
    if not isinstance(header, dict):
        raise file.error("Malformed", f"the header must be an object, got {type(header).__name__}", 8)
    if len(header) > _MAX_TENSORS:
        raise file.error("TooLarge", f"the header has {len(header)} entries, at most {_MAX_TENSORS} are read", 8)
    return header, 8 + length


def _read_metadata(file: MappedFile, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.error("Malformed", "__metadata__ must be an object of strings")
    return metadata


def _read_tensors(file: MappedFile, header: dict[str, object], data_start: int) -> dict[str, SafetensorsInfo]:
    infos = [_read_tensor(file, name, entry, data_start) for name, entry in header.items()]
    expected = data_start
    for info in sorted(infos, key=lambda info: (info.offset, info.n_bytes)):
        if info.offset != expected:
            message = f"{info.name} must start at {expected - data_start} (no hole, no overlap)"
            raise file.error("Malformed", f"{message}, got {info.offset - data_start}")
        expected += info.n_bytes
    if expected > file.size:
        raise file.error("Truncated", f"the tensors end at byte {expected}, the file at {file.size}")
    if expected < file.size:
        raise file.error("Malformed", f"{file.size - expected} bytes follow the last tensor", expected)
    return {info.name: info for info in infos}


def _read_tensor(file: MappedFile, name: str, entry: object, data_start: int) -> SafetensorsInfo:
    if not is_plain_name(name):
        raise file.error("Malformed", f"tensor name must be plain printable text, got {name!r}")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise file.error("Malformed", f"{name} must have exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise file.error("Unsupported", f"{name} has the unknown dtype {dtype!r}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise file.error("Malformed", f"{name} must have a shape of at most {_MAX_DIMS} counts, got {shape!r:.80}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise file.error("Malformed", f"{name} must have data_offsets [begin, end], got {offsets!r:.80}")
    n_bytes = offsets[1] - offsets[0]
    # Zeros count as one: a shape such as [0, 2^40, 2^40] overflows in other readers.
    if prod(max(dim, 1) for dim in shape) >= 2**63:
        raise file.error("TooLarge", f"{name} has the shape {shape}, more than 2^63 - 1 elements")
    if (needed := prod(shape) * _BITS[dtype]) != n_bytes * 8:
        raise file.error("Malformed", f"{name} has {n_bytes * 8} bits, {dtype} {shape} needs {needed}")
    return SafetensorsInfo(name, tuple(shape), data_start + offsets[0], n_bytes, dtype)


def _are_counts(values: object) -> bool:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)  # isinstance accepts bool as int


def tensor_bytes(
    tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file, header first, one tensor at a time. UserError for a dtype that is not written.

    The widest dtypes come first, so that all tensors are aligned. Contiguous arrays are not copied.
    """
    for name, array in tensors.items():
        if array.dtype not in _CODES:
            raise UserError(f"tensor file: {name} has the dtype {array.dtype}, expected one of {', '.join(_WRITTEN)}")
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries = ((name, _CODES[tensors[name].dtype], tensors[name].shape, tensors[name].nbytes) for name in names)
    yield header_bytes(entries, metadata=metadata)
    for name in names:
        yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def header_bytes(
    rows: Iterable[tuple[str, str, tuple[int, ...], int]], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Build the header from (name, dtype, shape, bytes) of each tensor, padded so that the data is aligned."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, dtype, shape, n_bytes in rows:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + n_bytes]}
        begin += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensors_from(data: UInt8[np.ndarray, " n_bytes"], path: Path) -> dict[str, np.ndarray]:
    """Return views, by name, of the tensors in the bytes of a file."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or 8 + length > len(data):
        raise FormatError("Truncated", f"the header claims {length} bytes, the file has {len(data)}", path=path)
    header = parse_json(data[8 : 8 + length].tobytes(), what="the header", path=path)
    if not isinstance(header, dict):
        raise FormatError("Malformed", f"the header must be an object, got {type(header).__name__}", path=path)
    return {name: _view(name, entry, data[8 + length :], path) for name, entry in header.items()}


def _view(name: str, entry: object, data: UInt8[np.ndarray, " n_bytes"], path: Path) -> np.ndarray:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            code in _WRITTEN
            and all(type(size) is int and size >= 0 for size in shape)
            and 0 <= begin <= end <= len(data)
            and end - begin == prod(shape) * np.dtype(_WRITTEN[code]).itemsize
        ):
            return data[begin:end].view(_WRITTEN[code]).reshape(shape)
    raise FormatError("Malformed", f"{name}: expected a tensor inside the file, got {entry!r:.80}", path=path)
