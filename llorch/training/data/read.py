"""Read rows of data strictly: JSON lines with one object per line, or a .json file with a list of objects.

Every error names file and line, or file and row of a list. Blank lines and a byte order mark at the start of a file are
skipped. NaN, duplicate keys and lone surrogates, which Python's parser accepts by default, are refused (`strict_json`).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llorch.files.mapped import open_regular
from llorch.files.strict_json import parse_json
from llorch.runtime.errors import FormatError

SPLITS = ("train", "valid", "test")
_MAX_LINE, _MAX_LIST = 16 << 20, 128 << 20  # bytes; a list is read into memory completely
_MAX_ITEMS = 1 << 22  # JSON items, such as token ids, in a line or list
_REMEDY = "name the file of a list .json, or make JSON lines of the list: jq -c '.[]' data.json > data.jsonl"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """Row of a data file."""

    values: dict[str, object]
    where: str  # path from the user and line, or row of a list, for messages
    source: str  # name of the file and line, or row of a list


def find_splits(path: Path) -> dict[str, Path]:
    """Map splits to files: a file is the train split; a folder has train.jsonl (or .json), optional valid and test."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"data: no such file or folder: {path}")
        return {"train": path}
    files = {split: [path / f"{split}.{suffix}" for suffix in ("jsonl", "json")] for split in SPLITS}
    existing = {s: next(filter(Path.is_file, pair)) for s, pair in files.items() if any(map(Path.is_file, pair))}
    if "train" not in existing:
        message = f"data: expected train.jsonl in {path}, got none"
        raise FileNotFoundError(f"{message}; valid.jsonl and test.jsonl are optional")
    return existing


def read_records(path: Path) -> Iterator[Record]:
    """Yield the rows of a file; FormatError for a row that is too long or no object, and for a file without rows."""
    empty = True
    with os.fdopen(open_regular(path), "rb") as file:
        # A .json file may hold a list or JSON lines; 4096 bytes are enough to skip leading blanks.
        is_list = path.suffix == ".json" and file.read(1 << 12).removeprefix(_BOM).lstrip().startswith(b"[")
        file.seek(0)
        for record in (_read_list if is_list else _read_lines)(file, path):
            empty = False
            yield record
    if empty:
        raise FormatError("Missing", "expected JSON lines, one object a line, got an empty file", path=path)


def _read_list(file: IO[bytes], path: Path) -> Iterator[Record]:
    data = file.read(_MAX_LIST + 1).removeprefix(_BOM)
    if len(data) > _MAX_LIST:
        raise FormatError("TooLarge", f"expected a list of at most {_MAX_LIST} bytes, got more; {_REMEDY}", path=path)
    rows = parse_json(data, what="the list", path=path, max_items=_MAX_ITEMS)
    assert isinstance(rows, list)
    for number, values in enumerate(rows, start=1):
        location, source = (f"{name} row {number}" for name in (path, path.name))
        if not isinstance(values, dict):
            raise FormatError("Malformed", f"expected an object, got {type(values).__name__}", path=location)
        yield Record(values, location, source)


def _read_lines(file: IO[bytes], path: Path) -> Iterator[Record]:
    for number, line in enumerate(_bounded_lines(file, path), start=1):
        if line.strip():
            location = f"{path}:{number}"
            yield Record(_parse(line, location), location, f"{path.name}:{number}")


def _bounded_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    number = 1
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            message = f"expected a line of at most {_MAX_LINE} bytes, got more"
            raise FormatError("TooLarge", message, path=f"{path}:{number}")
        yield line.removeprefix(_BOM) if number == 1 else line
        number += 1


def _parse(line: bytes, location: str) -> dict[str, object]:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise FormatError("Malformed", "expected UTF-8, got UTF-16; save the file as UTF-8", path=location)
    if line.strip() in (b"[", b"{"):
        raise FormatError("Malformed", f"expected a whole object on one line; {_REMEDY}", path=location)
    try:
        value = parse_json(line, what="the line", path=location, max_items=_MAX_ITEMS)
    except FormatError as error:
        column = f" (column {error.offset + 1})" if error.offset is not None else ""
        raise FormatError(error.code, error.message + column, path=location) from None
    if not isinstance(value, dict):
        remedy = f"; {_REMEDY}" if isinstance(value, list) else ""
        raise FormatError("Malformed", f"expected an object, got {type(value).__name__}{remedy}", path=location)
    return value
