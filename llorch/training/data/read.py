"""Rows of data, strictly read: JSON lines, one object a line, or a .json file that is a list of objects.

Every fault names its file and line, in a list its row.

A line of white space is skipped, and a byte order mark at the start of a file too. What Python's parser lets through
by default (NaN, equal keys, half surrogates) is refused, see `llorch.files.strict_json`.
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
_MAX_LINE, _MAX_LIST = 16 << 20, 128 << 20  # bytes; a list is in memory whole
_MAX_ITEMS = 1 << 22  # of a line or list: as many token ids fit
_REMEDY = "name the file of a list .json, or make JSON lines of the list: jq -c '.[]' data.json > data.jsonl"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One row."""

    values: dict[str, object]
    where: str  # file and line, or row of a list, as the user gave the path, for messages
    source: str  # the same, with the name of the file only


def find_splits(path: Path) -> dict[str, Path]:
    """Split to file: a file is all of it, a folder holds train.jsonl, perhaps valid and test; or .json."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"data: no such file or folder: {path}")
        return {"train": path}
    files = {split: [path / f"{split}.{ending}" for ending in ("jsonl", "json")] for split in SPLITS}
    found = {split: next(filter(Path.is_file, both)) for split, both in files.items() if any(map(Path.is_file, both))}
    if "train" not in found:
        message = f"data: expected train.jsonl in {path}, got none"
        raise FileNotFoundError(f"{message}; valid.jsonl and test.jsonl are optional")
    return found


def read_records(path: Path) -> Iterator[Record]:
    """Yield the rows of a file, a list or lines; FormatError for one too long, no object, or none."""
    empty = True
    with os.fdopen(open_regular(path), "rb") as file:
        is_list = path.suffix == ".json" and file.read(1 << 12).removeprefix(_BOM).lstrip().startswith(b"[")
        file.seek(0)
        for record in (_read_list if is_list else _read_lines)(file, path):
            empty = False
            yield record
    if empty:
        raise FormatError("Missing", "expected JSON lines, one object a line, got an empty file", path=path)


def _read_list(file: IO[bytes], path: Path) -> Iterator[Record]:
    """Yield the records of a file that holds one JSON list."""
    data = file.read(_MAX_LIST + 1).removeprefix(_BOM)
    if len(data) > _MAX_LIST:
        raise FormatError("TooLarge", f"expected a list of at most {_MAX_LIST} bytes, got more; {_REMEDY}", path=path)
    rows = parse_json(data, what="the list", path=path, max_items=_MAX_ITEMS)
    assert isinstance(rows, list)
    for number, values in enumerate(rows, start=1):
        where, source = (f"{name} row {number}" for name in (path, path.name))
        if not isinstance(values, dict):
            raise FormatError("Malformed", f"expected an object, got {type(values).__name__}", path=where)
        yield Record(values, where, source)


def _read_lines(file: IO[bytes], path: Path) -> Iterator[Record]:
    """Yield the records of a file that holds one JSON object a line."""
    for number, line in enumerate(_bounded_lines(file, path), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield Record(_parse(line, where), where, f"{path.name}:{number}")


def _bounded_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    number = 1
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            message = f"expected a line of at most {_MAX_LINE} bytes, got more"
            raise FormatError("TooLarge", message, path=f"{path}:{number}")
        yield line.removeprefix(_BOM) if number == 1 else line
        number += 1


def _parse(line: bytes, where: str) -> dict[str, object]:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise FormatError("Malformed", "expected UTF-8, got UTF-16; save the file as UTF-8", path=where)
    if line.strip() in (b"[", b"{"):
        raise FormatError("Malformed", f"expected a whole object on one line; {_REMEDY}", path=where)
    try:
        value = parse_json(line, what="the line", path=where, max_items=_MAX_ITEMS)
    except FormatError as error:
        column = f" (column {error.offset + 1})" if error.offset is not None else ""
        raise FormatError(error.code, error.message + column, path=where) from None
    if not isinstance(value, dict):
        remedy = f"; {_REMEDY}" if isinstance(value, list) else ""
        raise FormatError("Malformed", f"expected an object, got {type(value).__name__}{remedy}", path=where)
    return value
