"""Snapshots of a training run on disk: complete or absent, checked by digest when read; old ones are removed.

A snapshot is a folder `snapshots/step-00000010/` with the files of `snapshot_files`. It is written under a name that
begins with a dot, synced, and renamed:

    .new-step-00000010    being written; never read, removed at the next start
    .old-step-00000010    replaced by a new snapshot of the same step; restored if the new one is incomplete
    .gone-step-00000010   being removed; removed at the next start

Sharded tensors are written by each process into `tensors/`, between `begin` and `complete`.

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
    sync_parts,
    write_file,
)


class SnapshotStore:
    """Store of the snapshots in one run folder."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Store the run folder and the number of snapshots to keep, at least 1; nothing is written yet."""
        if keep < 1:
            raise UserError(f"snapshots: keep must be at least 1, got {keep}")
        self.folder = folder
        self.snapshots = folder / "snapshots"
        self._keep = keep

    @contextmanager
    def lock(self) -> Iterator[str | None]:
        """Lock the run folder, which is created if missing, and remove leftovers of a killed run.

        The lock ends with the process; BlockingIOError if another process holds it. Yield a warning without a lock.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _flock(self.folder) as warning:
            self.clear()
            yield warning

    def clear(self) -> None:
        """Remove leftovers of a killed run, and restore a replaced snapshot; the caller holds the lock."""
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
        """Write a snapshot, then remove old ones; the caller holds the lock.

        Snapshots of later steps are removed too, because the run was resumed before them. After an OSError while
        writing, earlier snapshots are unchanged; ValueError for a tensor or a value that cannot be stored.
        """
        new = self.begin(step)
        with self._clean_up_on_error(step):
            self._publish(step, record, {"sha256": write_file(new / TENSORS, tensor_bytes(tensors))})
        return self._prune(step)

    def begin(self, step: int) -> Path:
        """Create the folder of a new snapshot, in which processes create `tensors/`; the caller holds the lock."""
        with self._clean_up_on_error(step):
            self._prepare()
            os.mkdir(self._unfinished(step))
        return self._unfinished(step)

    def complete(self, step: int, record: Mapping[str, Any]) -> Path:
        """Finish a snapshot of `begin` after all processes wrote their tensors; remove old ones, as `save` does."""
        with self._clean_up_on_error(step):
            self._publish(step, record, {"files": sync_parts(self._unfinished(step) / PARTS)})
        return self._prune(step)

    def abandon(self, step: int) -> None:
        """Remove an unfinished snapshot; ignore errors of the file system."""
        with suppress(OSError):
            remove_tree(self._unfinished(step))

    def explained(self, error: OSError, step: int) -> OSError:
        """Return an error that names the snapshot that was not saved and the newest intact one."""
        with suppress(OSError):
            steps = [s for s in self.steps() if s != step]
            remaining = f"the snapshot of step {steps[-1]} is intact" if steps else "earlier snapshots: none"
            message = f"snapshot of step {step} not saved: {error.strerror}; {remaining}"
            return OSError(error.errno, message, str(self.snapshots))
        return error

    def newest(self, read_parts: ReadParts = no_parts) -> Snapshot | None:
        """Read the newest undamaged snapshot, with the reasons why newer ones were skipped; None without snapshots.

        `read_parts` reads sharded tensors. FormatError if all snapshots are unusable.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            try:
                snapshot = read_snapshot(self._folder_of(step), read_parts)
            except (FormatError, OSError) as error:
                reasons.append(str(error))
                continue
            return replace(snapshot, skipped=tuple(reasons))
        if reasons:
            message = f"expected a snapshot that can be read, got none: {'; '.join(reasons)}"
            raise FormatError("Inconsistent", message, path=self.snapshots)
        return None

    def steps(self) -> list[int]:
        """List the steps with a snapshot, damaged or not, in order."""
        if not os.path.exists(self.snapshots):
            return []
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in os.listdir(self.snapshots))
        return sorted(int(match[1]) for match in matches if match)

    def _prepare(self) -> None:
        """Create the folder of the snapshots, or remove leftovers of an interrupted save from it."""
        if os.path.exists(self.snapshots):
            self.clear()  # a failed save may not have cleaned up
        else:
            os.mkdir(self.snapshots)
            sync(self.folder)

    def _unfinished(self, step: int) -> Path:
        """Return the folder of an unfinished snapshot."""
        return _hidden_path(self._folder_of(step), "new")

    def _folder_of(self, step: int) -> Path:
        """Return the folder of a finished snapshot."""
        return self.snapshots / step_name(step)

    @contextmanager
    def _clean_up_on_error(self, step: int) -> Iterator[None]:
        """Remove the new snapshot if the block raises."""
        try:
            yield
        except BaseException as error:
            self.abandon(step)
            if isinstance(error, OSError):
                raise self.explained(error, step) from error
            raise

    def _publish(self, step: int, record: Mapping[str, Any], digests: Mapping[str, Any]) -> None:
        """Write the record, and rename the snapshot to its final name; it replaces a snapshot of the same step."""
        new, target = self._unfinished(step), self._folder_of(step)
        old = _hidden_path(target, "old")
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

    def _prune(self, newest: int) -> Path:
        """Remove old snapshots, and those of steps after `newest`; return the folder of the newest."""
        steps = self.steps()
        kept_steps = [step for step in steps if step <= newest][-self._keep :]
        for step in steps:
            if step not in kept_steps:
                removed = _hidden_path(self._folder_of(step), "gone")
                os.rename(self._folder_of(step), removed)  # so that a partly removed folder is never read
                sync(self.snapshots)
                remove_tree(removed)
        return self._folder_of(newest)


@contextmanager
def _flock(folder: Path) -> Iterator[str | None]:
    """Lock a folder against other runs (BlockingIOError); yield a warning if the system has no lock, else None."""
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
    """Tell if a file is a leftover of a killed run, by the names that `llorch.files.new_file` uses."""
    return re.fullmatch(r"\..+\.\d+\.tmp", name) is not None


def step_name(step: int) -> str:
    """Return the folder name of a snapshot; names sort like steps."""
    return f"step-{step:08}"


def _hidden_path(target: Path, mark: str) -> Path:
    return target.with_name(f".{mark}-{target.name}")
