"""Snapshots of a training run on disk: complete or absent, checked by digest when read, the last few kept.

A snapshot is a folder `snapshots/step-00000010/`; `snapshot_files` tells what is in it. It is written under a name that
begins with a dot, synced, and renamed:

    .new-step-00000010    being written; never read, removed at the next start
    .old-step-00000010    had to make room for a new one of the same step; back in its place if that did not arrive
    .gone-step-00000010   on its way out; removed at the next start

Tensors of which each process has a part are written between `begin` and `complete`, in `tensors/`.

Source: POSIX rename (atomic within a file system) and fsync (a rename may reach the disk before the data does).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llorch.files.new_file import sync
from llorch.files.safetensors import tensor_bytes
from llorch.runtime.errors import FormatError, UserError
from llorch.training.snapshot_files import (
    PARTS,
    RECORD,
    TENSORS,
    ReadParts,
    Snapshot,
    no_parts,
    read_snapshot,
    record_bytes,
    remove_tree,
    synced_parts,
    write_file,
)


class SnapshotStore:
    """The snapshots of one run folder."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Name the run folder, in which at least one snapshot stays; nothing is touched yet."""
        if keep < 1:
            raise UserError(f"snapshots: keep must be at least 1, got {keep}")
        self.folder = folder
        self.snapshots = folder / "snapshots"
        self._keep = keep

    @contextmanager
    def lock(self) -> Iterator[str | None]:
        """Hold the run folder, which is made if need be, and clear what a killed run left in it.

        The lock ends with the process; BlockingIOError while another holds it. Yields a warning where there is none.
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
                remove_tree(self.snapshots / name)

    def save(self, step: int, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> Path:
        """Write a snapshot, then remove those that are no longer kept; the caller holds the lock.

        Snapshots of later steps go too: the run was taken up before them. After an OSError of writing, the ones before
        are as they were; ValueError for a tensor or a value that cannot be expressed.
        """
        new = self.begin(step)
        with self._or_nothing(step):
            self._place(step, record, {"sha256": write_file(new / TENSORS, tensor_bytes(tensors))})
        return self._pruned(step)

    def begin(self, step: int) -> Path:
        """Make the folder of a new snapshot, below which `tensors/` is to be written; the caller holds the lock."""
        with self._or_nothing(step):
            self._prepare()
            os.mkdir(self._unfinished(step))
        return self._unfinished(step)

    def complete(self, step: int, record: Mapping[str, Any]) -> Path:
        """Put what was begun in its place once nobody writes to it any more; otherwise as `save`."""
        with self._or_nothing(step):
            self._place(step, record, {"files": synced_parts(self._unfinished(step) / PARTS)})
        return self._pruned(step)

    def abandon(self, step: int) -> None:
        """Remove what was begun, as far as that can be done now."""
        with suppress(OSError):
            remove_tree(self._unfinished(step))

    def explained(self, error: OSError, step: int) -> OSError:
        """Return an error that says which snapshot was not saved and which one is intact."""
        with suppress(OSError):
            others = [other for other in self.steps() if other != step]
            left = f"the snapshot of step {others[-1]} is intact" if others else "earlier snapshots: none"
            message = f"snapshot of step {step} not saved: {error.strerror}; {left}"
            return OSError(error.errno, message, str(self.snapshots))
        return error

    def newest(self, read_parts: ReadParts = no_parts) -> Snapshot | None:
        """Read the newest undamaged snapshot, with the reasons why newer ones were passed over; None without any.

        `read_parts` reads what several processes wrote. FormatError where none of the snapshots can be used.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            try:
                found = read_snapshot(self._folder_of(step), read_parts)
            except (FormatError, OSError) as error:
                reasons.append(str(error))
                continue
            return replace(found, skipped=tuple(reasons))
        if reasons:
            message = f"expected a snapshot that can be read, got none: {'; '.join(reasons)}"
            raise FormatError("Inconsistent", message, path=self.snapshots)
        return None

    def steps(self) -> list[int]:
        """List the steps that have a snapshot, damaged or not, in order."""
        if not os.path.exists(self.snapshots):
            return []
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in os.listdir(self.snapshots))
        return sorted(int(match[1]) for match in matches if match)

    def _prepare(self) -> None:
        """Make the folder of the snapshots, or remove what an interrupted save left in it."""
        if os.path.exists(self.snapshots):
            self.clear()  # a save that failed may not have been able to
        else:
            os.mkdir(self.snapshots)
            sync(self.folder)

    def _unfinished(self, step: int) -> Path:
        """Return the folder of a snapshot while it is written."""
        return _marked(self._folder_of(step), "new")

    def _folder_of(self, step: int) -> Path:
        """Return the folder of a finished snapshot."""
        return self.snapshots / step_name(step)

    @contextmanager
    def _or_nothing(self, step: int) -> Iterator[None]:
        """Remove all of the new snapshot if anything goes wrong."""
        try:
            yield
        except BaseException as error:
            self.abandon(step)
            if isinstance(error, OSError):
                raise self.explained(error, step) from error
            raise

    def _place(self, step: int, record: Mapping[str, Any], digests: Mapping[str, Any]) -> None:
        """Write the record and give the snapshot its name; one of the same step makes room."""
        new, target = self._unfinished(step), self._folder_of(step)
        old = _marked(target, "old")
        write_file(new / RECORD, [record_bytes(step, record, digests)])
        sync(new)
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
            remove_tree(old)

    def _pruned(self, newest: int) -> Path:
        """Remove snapshots that are no longer kept; returns the place of the newest."""
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-self._keep :]
        for step in steps:
            if step not in kept:
                gone = _marked(self._folder_of(step), "gone")
                os.rename(self._folder_of(step), gone)  # so that a part of it is never taken for it
                sync(self.snapshots)
                remove_tree(gone)
        return self._folder_of(newest)


@contextmanager
def _flock(folder: Path) -> Iterator[str | None]:
    """Lock a folder against other runs; yield a warning if the system has no such lock, else None."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield "this system has no flock, so llorch cannot lock the folder; start no second run in it"
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = "another run is writing to this folder; wait for that run, or choose another folder"
            raise BlockingIOError(error.errno, message, str(folder)) from None
        yield None
    finally:
        os.close(descriptor)


def is_leftover(name: str) -> bool:
    """Tell if a file was being written when its run was killed; `llorch.files.new_file` gives it such a name."""
    return re.fullmatch(r"\..+\.\d+\.tmp", name) is not None


def step_name(step: int) -> str:
    """Return the folder name of a snapshot; sorted names are sorted steps."""
    return f"step-{step:08}"


def _marked(target: Path, mark: str) -> Path:
    return target.with_name(f".{mark}-{target.name}")
