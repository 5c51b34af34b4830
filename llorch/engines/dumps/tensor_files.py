"""Dumps in formats that others made: .safetensors, .npz, .npy and folders of it.

Arrays are found by name; `ids` and `first_position` among them, or in the metadata that `llorch trace` writes, say
which tokens they are of. Nothing is unpickled: an array of objects is refused by its dtype. The .npy files in a .npz
file, stored or deflated, are mapped or inflated one by one, and inflate to what their headers say or are refused.

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
_MAX_DIRECTORY = 16 << 20  # bytes of the table of a .zip, which is read whole
_MAX_HEADER = 4096  # bytes of a .npy header; NumPy pads it to a few hundred
_MAX_INFLATED = 100  # times the deflated size; activations deflate to nine tenths
_LOCAL = struct.Struct("<4s22xHH")  # of a .zip, before each file: magic, ..., lengths of its name and its extra field


def open_safetensors_dump(path: Path) -> RawDump:
    """Read the tensors of a .safetensors file, and tokens and engine if `llorch trace` wrote them."""
    with open_safetensors(path) as file:
        arrays = [
            _array(Stored(path, info.offset, require_dtype(info.dtype, name, path), info.shape), name)
            for name, info in file.tensors.items()
        ]
        text = file.metadata.get("llorch")
    if text is None:
        return _dump(path, arrays)
    value = parse_json(text.encode(), what="the metadata", path=path)
    about = Fields(value if isinstance(value, dict) else {}, path)
    if not about.has("ids"):
        return _dump(path, arrays)
    ids = about.values["ids"]
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise about.error("Malformed", "ids", "a list of token ids", ids)
    tokens = Tokens(tuple(ids), about.integer("first_position", default=0, low=0))
    arrays_of_pass = tuple((0, array) for array in arrays)
    return RawDump(str(path), arrays_of_pass, (tokens,), Features(about.text("engine", default="")))


def open_npy(path: Path) -> RawDump:
    """Read one array, named like its file."""
    return _dump(path, [_npy(path)])


def from_npy_folder(folder: Path) -> RawDump:
    """Read the .npy files of a folder; raise FormatError Missing if it has none."""
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise FormatError("Missing", "the folder has no index.jsonl and no .npy file", path=folder)
    _require_few(paths, folder)
    return _dump(folder, [_npy(path) for path in paths])


def _npy(path: Path) -> RawArray:
    file = MappedFile(path)
    head = bytes(file.map[: _MAX_HEADER + 12])
    return _array(_from_header(head, path, path.stem, start=0, size=file.size), path.stem)


def open_npz(path: Path) -> RawDump:
    """Read the arrays of a .npz file."""
    with _BoundedFile(open_regular(path)) as file:
        try:
            members = ZipFile(file).infolist()
        except (BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error) as error:
            raise FormatError("Malformed", f"not a .npz file: {error}", path=path) from None
    _require_few(members, path)
    file = MappedFile(path)
    arrays = [_member(file, member) for member in members]
    return _dump(path, arrays)


class _BoundedFile(io.FileIO):
    """A file whose one large read, of the table of a .zip, is as long as the file says."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size > _MAX_DIRECTORY:
            raise BadZipFile(f"the table of the zip file has {size} bytes, at most {_MAX_DIRECTORY} are read")
        return super().read(size)


def _member(file: MappedFile, member: ZipInfo) -> RawArray:
    """Open one array of a .npz file; compressed data is inflated when the array is read."""
    name, path = require_name(member.filename.removesuffix(".npy"), file.path), file.path
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or member.flag_bits & 1:
        raise FormatError("Unsupported", f"{name} must be stored or deflated, without encryption", path=path)
    start = _data_start(file, member, name)
    if member.compress_type == ZIP_STORED:
        head = bytes(file.map[start : start + _MAX_HEADER + 12])
        return _array(_from_header(head, path, name, start=start, size=member.file_size), name)
    if member.file_size > max(member.compress_size * _MAX_INFLATED, 1 << 20):
        message = f"{name} claims to inflate from {member.compress_size} to {member.file_size} bytes; use numpy.savez"
        raise FormatError("TooLarge", message, path=path)
    head = _inflate(bytes(file.map[start : start + member.compress_size]), _MAX_HEADER + 12, name, path)
    stored = _from_header(head, path, name, start=0, size=member.file_size)
    return _array(stored, name, partial(_read_deflated, stored, member, start, name))


def _data_start(file: MappedFile, member: ZipInfo, name: str) -> int:
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
    """Locate the array of a .npy file of `size` bytes that begins at byte `start`."""
    width = 2 if head[6:7] == b"\1" else 4
    begin = 8 + width
    length = int.from_bytes(head[8:begin], "little")
    text = head[begin : begin + length].decode("latin-1")
    fields = [re.search(rf"'{key}': *{form}", text) for key, form in _NPY_FIELDS.items()]
    if head[:6] != b"\x93NUMPY" or len(text) != length or not all(fields):
        raise FormatError("Malformed", f"{name}: expected the .npy header of a plain array, got none", path=path)
    descr, order, sizes = (match[1] for match in fields if match)
    dtype = require_dtype(descr, name, path)
    shape = tuple(int(one) for one in re.findall(r"\d+", sizes))
    require_shape(shape, name, path)
    stored = Stored(path, start + begin + length, dtype, shape)
    if stored.end != start + size:
        message = f"{name}, {dtype} {list(shape)}, has {size - begin - length} bytes, expected"
        raise FormatError("Malformed", f"{message} {stored.end - stored.offset}", path=path)
    if order == "False" or len(shape) < 2:
        return stored
    strides = tuple(stored.itemsize * int(np.prod(shape[:axis])) for axis in range(len(shape)))
    return Stored(path, stored.offset, dtype, shape, strides)


_NPY_FIELDS = {"descr": "'([^']{1,40})'", "fortran_order": "(True|False)", "shape": r"\(([\d, ]{0,400})\)"}


def _require_few(arrays: Sized, path: Path) -> None:
    if len(arrays) > _MAX_ARRAYS:
        raise FormatError("TooLarge", f"{len(arrays)} arrays, at most {_MAX_ARRAYS} are read", path=path)


def _array(stored: Stored, name: str, read: partial[np.ndarray] | None = None) -> RawArray:
    require_name(name, stored.path)
    require_shape(stored.shape, name, stored.path)
    return RawArray(name, stored.dtype, stored.shape, read or stored.read)


def _dump(source: Path, arrays: Iterable[RawArray]) -> RawDump:
    """Collect arrays of one pass as a dump; `ids` and `first_position` are its tokens."""
    found: dict[str, RawArray] = {}
    for array in arrays:
        if array.name in found:
            raise FormatError("Duplicate", f"{array.name} is there twice", path=source)
        found[array.name] = array
    ids, first = found.pop("ids", None), found.pop("first_position", None)
    if not found:
        raise FormatError("Missing", "expected at least one array, got none", path=source)
    first_position = _whole(first, source)[0] if first else 0
    passes = (Tokens(_whole(ids, source), first_position),) if ids else ()
    return RawDump(str(source), tuple((0, array) for array in found.values()), passes)


def _whole(array: RawArray, source: Path) -> tuple[int, ...]:
    """Read token ids, or a position, from an array of integers for one sequence."""
    *batch, n_ids = array.shape or (1,)
    if "int" not in array.stored or n_ids > _MAX_IDS or any(size != 1 for size in batch):
        message = f"{array.name} must be integers for one sequence, got {array.stored} {list(array.shape)}"
        raise FormatError("Malformed", message, path=source)
    values = tuple(int(one) for one in array.read().reshape(-1))
    if not 0 <= min(values) <= max(values) < 2**31:
        raise FormatError("OutOfRange", f"{array.name} must be from 0 to 2^31 - 1, got {values!r:.80}", path=source)
    return values
