"""Dumps in the formats of other tools: .safetensors, .npz, .npy and folders of .npy files.

The tokens are in arrays named `ids` and `first_position`, or in the metadata that `llorch trace` writes. All arrays are
of one pass (call of the forward). Nothing is unpickled: an array of objects has an unsupported dtype. The .npy files in
a .npz file are mapped, or inflated one by one. If the inflated size differs from the header, the file is rejected.

Source: numpy.lib.format (layout of .npy), PKWARE APPNOTE 4.3 (layout of .zip).
"""

import io
import re
import struct
import zlib
from collections.abc import Iterable, Sized
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from llorch.engines.dumps.raw import RawArray, RawDump, Stored, from_bytes, require_dtype, require_name, require_shape
from llorch.engines.dumps.stage_dump import Features
from llorch.files.mapped import MappedFile, open_regular
from llorch.files.safetensors import open_safetensors
from llorch.files.strict_json import parse_json
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import Tokens

_MAX_ARRAYS = 65_536
_MAX_IDS = 1 << 20
_MAX_DIRECTORY = 16 << 20  # bytes of the central directory of a .zip, which is read as a whole
_MAX_HEADER = 4096  # bytes of a .npy header; NumPy pads it to a few hundred
_MAX_INFLATED = 100  # largest inflated over deflated size, above 1 MiB; activations deflate to 90 %, bombs to 0.1 %
_LOCAL = struct.Struct("<4s22xHH")  # local header in a .zip: magic, ..., lengths of the name and of the extra field


def open_safetensors_dump(path: Path) -> RawDump:
    """Read the tensors of a .safetensors file, and tokens and engine if `llorch trace` wrote them."""
    with open_safetensors(path) as file:
        arrays = [
            _raw_array(Stored(path, tensor.offset, require_dtype(tensor.dtype, name, path), tensor.shape), name)
            for name, tensor in file.tensors.items()
        ]
        text = file.metadata.get("llorch")
    if text is None:
        return _build_dump(path, arrays)
    value = parse_json(text.encode(), what="the metadata", path=path)
    metadata = Fields(value if isinstance(value, dict) else {}, path)
    if not metadata.has("ids"):
        return _build_dump(path, arrays)
    ids = metadata.values["ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise metadata.error("Malformed", "ids", "a list of token ids", ids)
    tokens = Tokens(tuple(ids), metadata.integer("first_position", default=0, low=0))
    pass_and_arrays = tuple((0, array) for array in arrays)
    return RawDump(str(path), pass_and_arrays, (tokens,), Features(metadata.text("engine", default="")))


def open_npy(path: Path) -> RawDump:
    """Read one array, named like its file."""
    return _build_dump(path, [_open_array(path)])


def from_npy_folder(folder: Path) -> RawDump:
    """Read the .npy files of a folder; raise FormatError Missing if it has none."""
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise FormatError("Missing", "the folder has no index.jsonl and no .npy file", path=folder)
    _require_few(paths, folder)
    return _build_dump(folder, [_open_array(path) for path in paths])


def _open_array(path: Path) -> RawArray:
    file = MappedFile(path)
    head = bytes(file.map[: _MAX_HEADER + 12])  # at most 12 bytes of magic, version and length
    return _raw_array(_from_header(head, path, path.stem, start=0, size=file.size), path.stem)


def open_npz(path: Path) -> RawDump:
    """Read the arrays of a .npz file."""
    with _BoundedFile(open_regular(path)) as file:
        try:
            members = ZipFile(file).infolist()
        except (BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error) as error:
            raise FormatError("Malformed", f"not a .npz file: {error}", path=path) from None
    _require_few(members, path)
    file = MappedFile(path)
    arrays = [_open_member(file, member) for member in members]
    return _build_dump(path, arrays)


class _BoundedFile(io.FileIO):
    """File that limits the size of one read, because zipfile trusts the size of the central directory in the file."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size > _MAX_DIRECTORY:
            raise BadZipFile(f"the table of the zip file has {size} bytes, at most {_MAX_DIRECTORY} are read")
        return super().read(size)


def _open_member(file: MappedFile, member: ZipInfo) -> RawArray:
    """Open one array of a .npz file; inflate compressed data only when the array is read."""
    name, path = require_name(member.filename.removesuffix(".npy"), file.path), file.path
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or member.flag_bits & 1:
        raise FormatError("Unsupported", f"{name} must be stored or deflated, without encryption", path=path)
    start = _data_start(file, member, name)
    if member.compress_type == ZIP_STORED:
        head = bytes(file.map[start : start + _MAX_HEADER + 12])
        return _raw_array(_from_header(head, path, name, start=start, size=member.file_size), name)
    if member.file_size > max(member.compress_size * _MAX_INFLATED, 1 << 20):
        message = f"{name} claims to inflate from {member.compress_size} to {member.file_size} bytes; use numpy.savez"
        raise FormatError("TooLarge", message, path=path)
    head = _inflate(bytes(file.map[start : start + member.compress_size]), _MAX_HEADER + 12, name, path)
    stored = _from_header(head, path, name, start=0, size=member.file_size)
    return _raw_array(stored, name, partial(_read_deflated, stored, member, start, name))


def _data_start(file: MappedFile, member: ZipInfo, name: str) -> int:
    """Return the offset of a member's data, after its local header; FormatError Truncated outside the file."""
    head = bytes(file.map[member.header_offset : member.header_offset + _LOCAL.size])
    magic, n_name, n_extra = _LOCAL.unpack(head) if len(head) == _LOCAL.size else (b"", 0, 0)
    start = member.header_offset + _LOCAL.size + n_name + n_extra
    if magic != b"PK\3\4" or start + member.compress_size > file.size:
        raise file.error("Truncated", f"{name} lies outside the file", member.header_offset)
    return start


def _read_deflated(stored: Stored, member: ZipInfo, start: int, name: str) -> np.ndarray:
    file = MappedFile(stored.path)
    data = _inflate(file.view(start, member.compress_size).tobytes(), member.file_size, name, stored.path)
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        message = f"{name} does not inflate to the size and checksum in the file"
        raise FormatError("Malformed", message, path=stored.path)
    data = data[stored.offset :]
    if stored.strides is None:
        return from_bytes(data, stored.dtype, stored.shape)
    return np.ascontiguousarray(from_bytes(data, stored.dtype, stored.shape[::-1]).T)


def _inflate(data: bytes, limit: int, name: str, path: Path) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, limit)
    except zlib.error as error:
        raise FormatError("Malformed", f"{name} cannot be inflated: {error}", path=path) from None


def _from_header(head: bytes, path: Path, name: str, *, start: int, size: int) -> Stored:
    """Return the location of the array of a .npy file of `size` bytes that starts at byte `start`."""
    width = 2 if head[6:7] == b"\1" else 4
    header_end = 8 + width
    length = int.from_bytes(head[8:header_end], "little")
    text = head[header_end : header_end + length].decode("latin-1")
    fields = [re.search(rf"'{key}': *{form}", text) for key, form in _NPY_FIELDS.items()]
    if head[:6] != b"\x93NUMPY" or len(text) != length or not all(fields):
        raise FormatError("Malformed", f"{name}: expected the .npy header of a plain array, got none", path=path)
    descr, order, sizes = (match[1] for match in fields if match)
    dtype = require_dtype(descr, name, path)
    shape = tuple(int(size) for size in re.findall(r"\d+", sizes))
    require_shape(shape, name, path)
    stored = Stored(path, start + header_end + length, dtype, shape)
    if stored.end != start + size:
        message = f"{name}, {dtype} {list(shape)}, has {size - header_end - length} bytes, expected"
        raise FormatError("Malformed", f"{message} {stored.end - stored.offset}", path=path)
    if order == "False" or len(shape) < 2:
        return stored
    strides = tuple(stored.itemsize * int(np.prod(shape[:axis])) for axis in range(len(shape)))
    return Stored(path, stored.offset, dtype, shape, strides)


_NPY_FIELDS = {"descr": "'([^']{1,40})'", "fortran_order": "(True|False)", "shape": r"\(([\d, ]{0,400})\)"}


def _require_few(arrays: Sized, path: Path) -> None:
    if len(arrays) > _MAX_ARRAYS:
        raise FormatError("TooLarge", f"{len(arrays)} arrays, at most {_MAX_ARRAYS} are read", path=path)


def _raw_array(stored: Stored, name: str, read: partial[np.ndarray] | None = None) -> RawArray:
    require_name(name, stored.path)
    require_shape(stored.shape, name, stored.path)
    return RawArray(name, stored.dtype, stored.shape, read or stored.read)


def _build_dump(source: Path, arrays: Iterable[RawArray]) -> RawDump:
    """Build a dump of one pass; arrays named `ids` and `first_position` are its tokens."""
    by_name: dict[str, RawArray] = {}
    for array in arrays:
        if array.name in by_name:
            raise FormatError("Duplicate", f"{array.name} is there twice", path=source)
        by_name[array.name] = array
    ids, first = by_name.pop("ids", None), by_name.pop("first_position", None)
    if not by_name:
        raise FormatError("Missing", "expected at least one array, got none", path=source)
    first_position = _read_integers(first, source)[0] if first else 0
    passes = (Tokens(_read_integers(ids, source), first_position),) if ids else ()
    return RawDump(str(source), tuple((0, array) for array in by_name.values()), passes)


def _read_integers(array: RawArray, source: Path) -> tuple[int, ...]:
    """Read token ids, or a position, from an integer array of one sequence; axes of size 1 may precede."""
    *batch, n_ids = array.shape or (1,)
    if "int" not in array.stored or n_ids > _MAX_IDS or any(size != 1 for size in batch):
        message = f"{array.name} must be integers for one sequence, got {array.stored} {list(array.shape)}"
        raise FormatError("Malformed", message, path=source)
    integers = tuple(int(number) for number in array.read().reshape(-1))
    if not 0 <= min(integers) <= max(integers) < 2**31:
        raise FormatError("OutOfRange", f"{array.name} must be from 0 to 2^31 - 1, got {integers!r:.80}", path=source)
    return integers
