"""The two files of a snapshot: tensors, and a record with the digests of both.

    snapshot.safetensors    tensors
    snapshot.json           {"sha256": of this file without the digest, "tensors": {"sha256": ...}, "record": ...}

So every bit of both is covered, and a file that was cut or changed is told from one that was written so.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llorch.errors import FormatError
from llorch.files.safetensors import tensors_from
from llorch.files.strict_json import parse_json

TENSORS, RECORD = "snapshot.safetensors", "snapshot.json"
FORMAT = 1
_HEAD = b'{\n "sha256": "'  # of all bytes of the file but the digest itself
_DIGITS = 64


@dataclass(frozen=True)
class Snapshot:
    """A saved state that was read and whose digests are right."""

    step: int
    tensors: Mapping[str, np.ndarray]  # the arrays can be written to
    record: Mapping[str, Any]  # what is no tensor
    path: Path
    skipped: tuple[str, ...] = ()  # why newer ones were passed over, a line each


def record_bytes(step: int, record: Mapping[str, Any], tensors_digest: str) -> bytes:
    """The bytes of the record's file; ValueError for NaN or infinity."""
    values = {"format": FORMAT, "step": step, "tensors": {"sha256": tensors_digest}, "record": record}
    body = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False).encode()
    tail = b'",' + body[1:] + b"\n"
    return _HEAD + hashlib.sha256(_HEAD + tail).hexdigest().encode() + tail


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot and check its digests; FormatError where it is damaged, incomplete, or of another format."""
    for name in (RECORD, TENSORS):
        if not (path / name).is_file():
            raise FormatError("Missing", f"the snapshot has no {name}", path=path)
    values = _checked_record((path / RECORD).read_bytes(), path / RECORD)
    match values:
        case {"format": 1, "step": int(step), "tensors": {"sha256": digest}, "record": dict(record)}:
            data = np.fromfile(path / TENSORS, np.uint8)
            _require_digest(hashlib.sha256(data.data).hexdigest(), digest, path / TENSORS)
            return Snapshot(step, tensors_from(data, path / TENSORS), record, path)
    message = f"expected a snapshot of format {FORMAT}, got {values!r:.80}; it is of another version of llorch"
    raise FormatError("Unsupported", message, path=path / RECORD)


def _checked_record(data: bytes, path: Path) -> dict[str, Any]:
    start = len(_HEAD)
    digest, tail = data[start : start + _DIGITS], data[start + _DIGITS :]
    if not data.startswith(_HEAD):
        raise FormatError("Malformed", f"expected a snapshot record, got {data[:40]!r}", path=path)
    _require_digest(hashlib.sha256(_HEAD + tail).hexdigest(), digest.decode("latin-1"), path)
    values = parse_json(data, what="the record", path=path)
    assert isinstance(values, dict)
    return values


def _require_digest(got: str, wanted: object, path: Path) -> None:
    if got != wanted:
        message = f"damaged: its sha256 is {got:.16}..., the one recorded when it was saved {wanted!s:.16}..."
        raise FormatError("Inconsistent", message, path=path)
