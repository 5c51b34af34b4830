"""Snapshots of several processes (ranks), written while training continues: complete or absent, as with one process.

    save    rank 0 makes the folder; every rank copies its parts of the tensors, and a thread of the rank writes them
    poll    once all parts are written, rank 0 syncs them to disk and moves the snapshot to its final name
    wait    every rank learns if the snapshot was saved

Messages go through a separate process group, so that they do not mix with training's; a rank waits up to a timeout.

Source: torch.distributed.checkpoint.async_save.
"""

import copy
import errno
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save

from llorch.pytorch.distributed.launch import TIMEOUT
from llorch.runtime.errors import printable
from llorch.training.snapshot_files import PARTS
from llorch.training.snapshots import SnapshotStore

Result = TypeVar("Result")


@dataclass
class _Pending:
    """Snapshot that is being written."""

    step: int
    record: Mapping[str, Any]
    written: Future  # done once this rank knows that all ranks have written
    over: bool = False  # completed or abandoned
    error: Exception | None = None  # reason if it was abandoned


class ShardedSaver:
    """Saver of sharded tensors; all ranks call `save` and `wait` in the same order."""

    def __init__(self, store: SnapshotStore, *, timeout: timedelta = TIMEOUT) -> None:
        """Create a process group with all ranks; only rank 0 uses the snapshot store, and holds its lock."""
        self._store = store
        group = dist.new_group(timeout=timeout, backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # it includes this rank
        self._group = group
        self._pending: _Pending | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Start a snapshot after the previous one is finished; tensors and record may be changed afterwards.

        Names are equal on all ranks. A DTensor is saved completely, from all parts; any other tensor from one rank. The
        record has values that are not tensors; rank 0's record is saved. Raises the errors of `wait` for the previous
        snapshot, and OSError on every rank if this snapshot cannot be started.
        """
        self.wait()
        folder = self._from_rank_0(lambda: self._store.begin(step) / PARTS)
        parts = {name: tensor.detach() for name, tensor in tensors.items()}
        written = async_save(parts, checkpoint_id=folder, process_group=self._group)
        assert isinstance(written, Future)
        self._pending = _Pending(step, copy.deepcopy(record), written)

    def poll(self) -> None:
        """Complete a snapshot that all ranks have written: rank 0 acts, no rank waits; `wait` reports errors."""
        pending = self._pending
        if dist.get_rank() == 0 and pending and not pending.over and pending.written.done():
            self._finish(pending)

    def wait(self) -> None:
        """Wait for the snapshot that is being written, if there is one, and complete it.

        Raises OSError on every rank if it could not be saved (nothing of it remains), and RuntimeError if another rank
        is lost or exceeded the timeout.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.written.exception()  # blocks until this rank has written
            self._from_rank_0(lambda: self._finish_or_raise(pending))

    def _finish_or_raise(self, pending: _Pending) -> None:
        """Complete or abandon a snapshot if `poll` has not, and raise its error."""
        if not pending.over:
            self._finish(pending)
        if pending.error is not None:
            raise pending.error

    def _finish(self, pending: _Pending) -> None:
        """Complete or abandon a snapshot; store its error for `_finish_or_raise`."""
        failure = pending.written.exception()
        try:
            if failure is not None:
                self._store.abandon(pending.step)
                raise self._store.explained(_first_error(failure), pending.step) from failure
            self._store.complete(pending.step, pending.record)
        except Exception as error:
            pending.error = error
        pending.over = True

    def _from_rank_0(self, work: Callable[[], Result]) -> Result:
        """Call `work` on rank 0; return its value or raise its error on every rank."""
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                outcome = [work()]
            except Exception as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]


def _first_error(failure: BaseException) -> OSError:
    """Convert a failure of torch's saver to an OSError: that of the lowest rank that failed."""
    if not isinstance(failure, CheckpointException):
        return OSError(errno.EIO, printable(f"{type(failure).__name__}: {failure}"))
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, OSError):
        return OSError(error.errno, f"rank {rank}: {error.strerror}")
    return OSError(errno.EIO, printable(f"rank {rank}: {type(error).__name__}: {error}"))
