"""Snapshots of a training run on disk: complete or absent, checked by digest when read, the last few kept.

A snapshot is two files in `snapshots/step-00000010/`, every bit of which a digest covers, so that one that was cut or
changed is told from one that was written so:

    snapshot.safetensors    tensors
    snapshot.json           {"sha256": of this file without the digest, "tensors": {"sha256": ...}, "record": ...}

They are written into a folder whose name begins with a dot, synced, and renamed:

    .new-step-00000010    being written; never read, removed at the next start
    .old-step-00000010    had to make room for a new one of the same step; back in its place if that did not arrive
    .gone-step-00000010   on its way out; removed at the next start

Files are written through `os` alone, so that tests can make any one operation fail, or the power.

Source: POSIX rename (atomic within a file system) and fsync (a rename may reach the disk before the data does).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llorch.errors import FormatError
from llorch.files.new_file import sync
from llorch.files.safetensors import tensor_bytes, tensors_from
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


class SnapshotStore:
    """The snapshots of one run folder."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Name the run folder, in which at least one snapshot stays; nothing is touched yet."""
        if keep < 1:
            raise ValueError(f"snapshots: keep must be at least 1, got {keep}")
        self.folder = folder
        self.snapshots = folder / "snapshots"
        self._keep = keep

    @contextmanager
    def lock(self) -> Iterator[str | None]:
        """Hold the run folder, which is made if need be, and clear what a killed run left in it.

        The lock ends with the process, however that ends; BlockingIOError while another one holds it. Yields a sentence
        where this system has no such lock, else None.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _flock(self.folder) as without:
            self.clear()
            yield without

    def clear(self) -> None:
        """Remove what a killed run left behind; the caller holds the lock."""
        for name in os.listdir(self.folder):
            if is_leftover(name):
                os.unlink(self.folder / name)
        for name in os.listdir(self.snapshots) if os.path.exists(self.snapshots) else ():
            mark, _, step = name.partition("-")
            if mark == ".old" and not os.path.exists(self.snapshots / step):
                os.rename(self.snapshots / name, self.snapshots / step)
            elif mark in (".new", ".old", ".gone"):
                _remove_tree(self.snapshots / name)

    def save(self, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> Path:
        """Write a snapshot, then remove those that are no longer kept; the caller holds the lock.

        Snapshots of later steps go too: the run was taken up before them. After an OSError of writing, the ones before
        are as they were; ValueError for a tensor or a value that cannot be expressed.
        """
        target = self.snapshots / step_name(step)
        try:
            self._prepare()
            self._write(target, step, tensors, record)
        except OSError as error:
            raise self._explained(error, step) from error
        self._prune(step)
        return target

    def newest(self) -> Snapshot | None:
        """Read the newest undamaged snapshot, with the reasons why newer ones were passed over; None without any.

        FormatError where there are some, and none can be used.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            try:
                found = read_snapshot(self.snapshots / step_name(step))
            except (FormatError, OSError) as error:
                reasons.append(str(error))
                continue
            return replace(found, skipped=tuple(reasons))
        if reasons:
            raise FormatError("Inconsistent", f"no snapshot can be used: {'; '.join(reasons)}", path=self.snapshots)
        return None

    def steps(self) -> list[int]:
        """Steps of which there is a snapshot, damaged or not, in order."""
        if not os.path.exists(self.snapshots):
            return []
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in os.listdir(self.snapshots))
        return sorted(int(match[1]) for match in matches if match)

    def _prepare(self) -> None:
        if os.path.exists(self.snapshots):
            self.clear()  # a save that failed may not have been able to
        else:
            os.mkdir(self.snapshots)
            sync(self.folder)

    def _write(self, target: Path, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Write the files under another name and put them in place."""
        new = _marked(target, "new")
        try:
            os.mkdir(new)
            digest = _write_new_file(new / TENSORS, tensor_bytes(tensors))
            _write_new_file(new / RECORD, [record_bytes(step, record, digest)])
            sync(new)
            self._place(new, target)
        except BaseException:
            with suppress(OSError):
                _remove_tree(new)
            raise

    def _place(self, new: Path, target: Path) -> None:
        """Give a finished snapshot its name; one of the same step makes room."""
        old = _marked(target, "old")
        replaces = os.path.exists(target)
        if replaces:
            os.rename(target, old)
        try:
            os.rename(new, target)
        except BaseException:
            if replaces:
                os.rename(old, target)
            raise
        sync(self.snapshots)
        if replaces:
            _remove_tree(old)

    def _prune(self, newest: int) -> None:
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-self._keep :]
        for step in steps:
            if step not in kept:
                target = self.snapshots / step_name(step)
                os.rename(target, _marked(target, "gone"))  # so that a part of it is never taken for it
                sync(self.snapshots)
                _remove_tree(_marked(target, "gone"))

    def _explained(self, error: OSError, step: int) -> OSError:
        with suppress(OSError):
            others = [other for other in self.steps() if other != step]
            left = f"the one of step {others[-1]} is intact" if others else "there is none before it"
            message = f"snapshot of step {step} not saved: {error.strerror}; {left}"
            return OSError(error.errno, message, str(self.snapshots))
        return error


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


@contextmanager
def _flock(folder: Path) -> Iterator[str | None]:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield "this system has no flock: see to it that no second run writes to the folder"
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = "another run is writing to this folder; wait for it, or choose another one"
            raise BlockingIOError(error.errno, message, str(folder)) from None
        yield None
    finally:
        os.close(descriptor)


def _write_new_file(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file that must be new, and wait until it lies on the device; gives its SHA-256.

    After an OSError part of it may be there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    sha256 = hashlib.sha256()
    try:
        for part in parts:
            sha256.update(part)
            rest = memoryview(part)
            while len(rest):
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sha256.hexdigest()


def _remove_tree(path: Path) -> None:
    """Remove a folder of files."""
    for name in os.listdir(path):
        os.unlink(path / name)
    os.rmdir(path)


def is_leftover(name: str) -> bool:
    """Whether a file was being written when its run was killed; `llorch.files.new_file` gives it such a name."""
    return re.fullmatch(r"\..+\.\d+\.tmp", name) is not None


def step_name(step: int) -> str:
    """The folder name of a snapshot; sorted names are sorted steps."""
    return f"step-{step:08}"


def _marked(target: Path, mark: str) -> Path:
    return target.with_name(f".{mark}-{target.name}")
