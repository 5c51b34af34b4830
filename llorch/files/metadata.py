"""The metadata section of a GGUF file: typed keys and values, read with every length checked first.

A hostile file can declare any length. Lengths are Python integers (no overflow). Each is compared with the remaining
bytes of the file, and with a limit, before an allocation or a loop of that size.

Source: ggml docs/gguf.md (container), ggml src/gguf.cpp (checks of llama.cpp).
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
from gguf import GGUFValueType

from llorch.files.mapped import MappedFile
from llorch.runtime.errors import ErrorCode, FormatError


@dataclass(frozen=True, kw_only=True)
class MetadataLimits:
    """Limits of a GGUF header; the defaults allow any real model."""

    metadata_entries: int = 65_536
    tensors: int = 65_536
    header_bytes: int = 256 << 20  # metadata and tensor table together
    key_bytes: int = 65_535
    string_bytes: int = 16 << 20
    array_elements: int = 1 << 22  # checked after the file size: arrays that end after the file are Truncated
    checked_array_length: int = 1 << 30  # checked before the file size: larger arrays are TooLarge, as in llama.cpp
    name_bytes: int = 63  # ggml stores 64 with the terminating NUL
    dimensions: int = 4
    alignment: int = 65_536
    data_end: int = 1 << 40  # a tensor that ends beyond 1 TiB is OutOfBounds, not Truncated


DEFAULT_LIMITS = MetadataLimits()

Value = int | float | bool | str | np.ndarray | Sequence

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
NUMBERS = {
    GGUFValueType[name]: np.dtype(code)
    for name, code in {
        "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
        "UINT64": "<u8", "INT64": "<i8", "FLOAT32": "<f4", "FLOAT64": "<f8", "BOOL": "u1",
    }.items()
}  # fmt: skip


class StringArray(Sequence[bytes]):
    """Byte strings in two objects, because 128,000 Python strings would need several times the bytes of the file."""

    def __init__(self, blob: bytes, starts: np.ndarray) -> None:
        """Wrap strings, each after its 8-byte length; `starts`: offset of each text, and of one more after the blob."""
        self._blob = blob
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[item_index] for item_index in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self._blob[self._starts[position] : self._starts[position + 1] - 8]

    def __iter__(self) -> Iterator[bytes]:
        starts = self._starts.tolist()
        for start, next_start in pairwise(starts):
            yield self._blob[start : next_start - 8]

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings, {len(self._blob)} bytes)"


class Cursor:
    """Position in the header, which advances only over existing bytes. `subject` names in errors what is read."""

    def __init__(self, file: MappedFile, limits: MetadataLimits) -> None:
        """Start at the beginning of the file."""
        self.file = file
        self.limits = limits
        self.position = 0

    def error(self, code: ErrorCode, message: str, offset: int | None = None) -> FormatError:
        """Return an error for an offset, or for the current position."""
        return self.file.error(code, message, self.position if offset is None else offset)

    def skip(self, n_bytes: int, subject: str) -> int:
        """Advance by bytes that must exist, else FormatError Truncated or TooLarge; return the position before them."""
        start, end = self.position, self.position + n_bytes
        if end > self.file.size:
            n_left = self.file.size - start
            raise self.error("Truncated", f"{subject} needs {n_bytes} bytes, the file has {n_left} left")
        if end > self.limits.header_bytes:
            raise self.error("TooLarge", f"{subject} ends beyond the header limit {self.limits.header_bytes}")
        self.position = end
        return start

    def u32(self, subject: str) -> int:
        """Read an unsigned 32-bit number."""
        return _U32.unpack_from(self.file.map, self.skip(4, subject))[0]

    def u64(self, subject: str) -> int:
        """Read an unsigned 64-bit number."""
        return _U64.unpack_from(self.file.map, self.skip(8, subject))[0]

    def text(self, subject: str, *, limit: int, over_limit: ErrorCode = "TooLarge") -> str:
        """Read a length and that many bytes of UTF-8; FormatError `over_limit` for more than `limit` bytes."""
        data = self._text_bytes(subject, limit, over_limit)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            start = self.position - len(data)
            raise self.error("Malformed", f"{subject} is not UTF-8: {error.reason}", start) from None

    def _text_bytes(self, subject: str, limit: int, over_limit: ErrorCode) -> bytes:
        length = self.u64(f"{subject} length")
        start = self.skip(length, subject)
        if length > limit:
            raise self.error(over_limit, f"{subject} has {length} bytes, at most {limit} are allowed", start)
        return self.file.map[start : start + length]

    def _string(self, subject: str) -> str | bytes:
        """Read a string value: str, or bytes if it is not UTF-8, which `Fields.text` refuses."""
        data = self._text_bytes(subject, self.limits.string_bytes, "TooLarge")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data

    def value_type(self, subject: str) -> GGUFValueType:
        """Read a value type; Malformed for a number that GGUF does not define."""
        number = self.u32(f"type of {subject}")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.error("Malformed", f"type of {subject} must be 0..12, got {number}") from None

    def value(self, kind: GGUFValueType, subject: str) -> Value:
        """Read a value of a known type: a Python scalar, a NumPy array or a `StringArray`."""
        if kind is GGUFValueType.STRING:
            return self._string(subject)
        if kind is GGUFValueType.ARRAY:
            return self._array(subject)
        return self._numbers(kind, 1, subject)[0].item()

    def _array(self, subject: str) -> np.ndarray | StringArray:
        kind = self.value_type(f"elements of {subject}")
        if kind is GGUFValueType.ARRAY:
            raise self.error("Unsupported", f"{subject} is an array of arrays, which llorch does not read")
        count = self.u64(f"element count of {subject}")
        if count > self.limits.checked_array_length:
            raise self.error("TooLarge", f"{subject} claims {count} elements, at most 2^30 are possible")
        least_bytes = 8 if kind is GGUFValueType.STRING else NUMBERS[kind].itemsize
        start = self.skip(count * least_bytes, subject)
        if count > self.limits.array_elements:
            allowed = self.limits.array_elements
            raise self.error("TooLarge", f"{subject} has {count} elements, at most {allowed} are allowed", start)
        self.position = start  # back: the `skip` above only checked that the bytes exist
        return self._strings(count, subject) if kind is GGUFValueType.STRING else self._numbers(kind, count, subject)

    def _numbers(self, kind: GGUFValueType, count: int, subject: str) -> np.ndarray:
        dtype = NUMBERS[kind]
        start = self.skip(count * dtype.itemsize, subject)
        # A copy: metadata must stay readable if the file is truncated later.
        numbers = np.frombuffer(self.file.map, dtype, count, start).copy()
        if kind is not GGUFValueType.BOOL:
            return numbers
        if numbers.size and numbers.max() > 1:
            raise self.error("Malformed", f"{subject} must be 0 or 1 as a bool, got {numbers.max()}", start)
        return numbers.astype(bool)

    def _strings(self, count: int, subject: str) -> StringArray:
        first = position = self.position  # no `skip` for each string: a vocabulary has more than 100,000
        end = min(self.file.size, self.limits.header_bytes)
        starts, buffer, unpack = array("q"), self.file.map, _U64.unpack_from
        for index in range(count):
            after_length = position + 8
            length = unpack(buffer, position)[0] if after_length <= end else 0
            if length > self.limits.string_bytes or after_length + length > end:
                self._refuse_string(index, position, length, subject)
            starts.append(after_length - first)
            position = after_length + length
        starts.append(position - first + 8)
        self.position = position
        return StringArray(buffer[first:position], np.frombuffer(starts, np.int64))

    def _refuse_string(self, index: int, position: int, length: int, subject: str) -> None:
        self.position = position
        self.skip(8 + length, f"string {index} of {subject}")  # raises if the bytes are missing; else it is too long
        message = f"string {index} of {subject} has {length} bytes, at most {self.limits.string_bytes} are allowed"
        raise self.error("TooLarge", message, position)


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Value], dict[str, GGUFValueType]]:
    """Read `count` keys with their values and types, in file order."""
    values: dict[str, Value] = {}
    kinds: dict[str, GGUFValueType] = {}
    for index in range(count):
        start = cursor.position
        key = cursor.text(f"key {index}", limit=cursor.limits.key_bytes)
        if not key:
            raise cursor.error("Malformed", f"key {index} is empty", start)
        if key in values:
            raise cursor.error("Duplicate", f"key {key!r} occurs twice", start)
        kinds[key] = cursor.value_type(f"key {key!r}")
        values[key] = cursor.value(kinds[key], f"key {key!r}")
    return values, kinds
