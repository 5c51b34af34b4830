"""Write and read the files of one snapshot; digests cover every byte.

    snapshot.safetensors    tensors, or
    tensors/                sharded tensors of several processes, written by torch.distributed.checkpoint
    snapshot.json           {"sha256": of this file without the digest, "tensors": digests, "record": ...}

Digests of tensors are {"sha256": ...} of the file, or {"files": {name: sha256}} of the folder. They prove that a
snapshot is as it was written, neither truncated nor changed.

Files are written only through `os`, so that tests can simulate a failure of any operation, or a power failure.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llorch.files.new_file import sync
from llorch.files.safetensors import tensors_from
from llorch.files.strict_json import parse_json
from llorch.runtime.errors import FormatError

TENSORS, PARTS, RECORD = "snapshot.safetensors", "tensors", "snapshot.json"
FORMAT = 1
_HEAD = b'{\n "sha256": "'  # start of the record; then the digest of all bytes but its own
_DIGITS = 64  # hexadecimal digits of a SHA-256

ReadParts = Callable[[Path], Mapping[str, np.ndarray]]  # called with the folder; FormatError if it cannot be read


@dataclass(frozen=True)
class Snapshot:
    """Snapshot that was read and whose digests match."""

    step: int
    tensors: Mapping[str, np.ndarray]  # writable arrays
    record: Mapping[str, Any]  # all values except tensors
    path: Path
    skipped: tuple[str, ...] = ()  # reasons why newer snapshots were skipped


def record_bytes(step: int, record: Mapping[str, Any], digests: Mapping[str, Any]) -> bytes:
    """Serialise a snapshot's record, after its own digest; ValueError for NaN or infinity."""
    values = {"format": FORMAT, "step": step, "tensors": digests, "record": record}
    body = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False).encode()
    tail = b'",' + body[1:] + b"\n"  # without the brace, which is in _HEAD
    return _HEAD + hashlib.sha256(_HEAD + tail).hexdigest().encode() + tail


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a new file and sync it; return its SHA-256. After an OSError a partial file may exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    sha256 = hashlib.sha256()
    try:
        for part in parts:
            sha256.update(part)
            remaining = memoryview(part)
            while len(remaining):
                remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sha256.hexdigest()


def sync_parts(folder: Path) -> dict[str, str]:
    """Sync a folder and its files to disk; return the SHA-256 of each file."""
    digests = {}
    for name in sorted(os.listdir(folder)):
        sync(folder / name)
        digests[name] = _digest_of_file(folder / name)
    sync(folder)
    return digests


def remove_tree(path: Path) -> None:
    """Remove the folder of a snapshot, complete or not."""
    for name in os.listdir(path):
        if name == PARTS:
            remove_tree(path / name)
        else:
            os.unlink(path / name)
    os.rmdir(path)


def no_parts(folder: Path) -> Mapping[str, np.ndarray]:
    """Refuse sharded tensors (FormatError): the `ReadParts` for callers without torch."""
    message = "several processes wrote these tensors, which only the torch path reads; install torch"
    raise FormatError("Unsupported", message, path=folder)


def read_snapshot(path: Path, read_parts: ReadParts = no_parts) -> Snapshot:
    """Read one snapshot and check its digests; FormatError if it is damaged, incomplete, or of another format."""
    _require_file(path, RECORD)
    values = _parse_record((path / RECORD).read_bytes(), path / RECORD)
    match values:
        case {"format": 1, "step": int(step), "tensors": {"sha256": digest}, "record": dict(record)}:
            return Snapshot(step, _read_tensors(path, digest), record, path)
        case {"format": 1, "step": int(step), "tensors": {"files": dict(digests)}, "record": dict(record)}:
            _require_parts(path, digests)
            return Snapshot(step, read_parts(path / PARTS), record, path)
    message = f"expected a snapshot of format {FORMAT}, got {values!r:.80}"
    remedy = "read it with the version of llorch that wrote it"
    raise FormatError("Unsupported", f"{message}; {remedy}", path=path / RECORD)


def _read_tensors(path: Path, digest: object) -> Mapping[str, np.ndarray]:
    _require_file(path, TENSORS)
    data = np.fromfile(path / TENSORS, np.uint8)
    _require_digest(hashlib.sha256(data.data).hexdigest(), digest, path / TENSORS)
    return tensors_from(data, path / TENSORS)


def _require_parts(path: Path, digests: Mapping[str, object]) -> None:
    """Require exactly the saved files with the saved digests in the folder; FormatError otherwise."""
    for name in sorted(digests):
        _require_file(path, f"{PARTS}/{name}")
    if unexpected := sorted(set(os.listdir(path / PARTS)) - digests.keys()):
        message = f"expected only the files that were saved, got also {unexpected[0]}"
        raise FormatError("Unexpected", message, path=path / PARTS)
    for name, digest in digests.items():
        _require_digest(_digest_of_file(path / PARTS / name), digest, path / PARTS / name)


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_file(path: Path, name: str) -> None:
    if not (path / name).is_file():
        raise FormatError("Missing", f"expected the file {name} in the snapshot, got none", path=path)


def _parse_record(data: bytes, path: Path) -> dict[str, Any]:
    start = len(_HEAD)
    digest, tail = data[start : start + _DIGITS], data[start + _DIGITS :]
    if not data.startswith(_HEAD):
        raise FormatError("Malformed", f"expected a snapshot record, got {data[:40]!r}", path=path)
    _require_digest(hashlib.sha256(_HEAD + tail).hexdigest(), digest.decode("latin-1"), path)
    values = parse_json(data, what="the record", path=path)
    assert isinstance(values, dict)
    return values


def _require_digest(actual: str, expected: object, path: Path) -> None:
    if actual != expected:
        message = f"the file is damaged: expected the recorded sha256 {expected!s:.16}..., got {actual:.16}..."
        raise FormatError("Inconsistent", message, path=path)
