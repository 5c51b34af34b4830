"""Snapshots of several processes, written while the training goes on: complete or absent, as with one process.

    save    rank 0 makes the folder; every rank copies its parts, and a thread of it writes them
    poll    rank 0, once all are written, syncs and puts the snapshot in its place
    wait    every rank learns the result

A rank waits for another at most for a time, in a process group of its own, so that nothing mixes with the training's.

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

Made = TypeVar("Made")


@dataclass
class _Pending:
    """A snapshot that is being written."""

    step: int
    record: Mapping[str, Any]
    written: Future  # by all ranks, as far as this one knows
    over: bool = False  # it is in its place, or abandoned
    error: Exception | None = None  # why it was abandoned


class ShardedSaver:
    """Saves snapshots of tensors of which each rank has parts; all ranks call `save` and `wait`, in the same order."""

    def __init__(self, store: SnapshotStore, *, timeout: timedelta = TIMEOUT) -> None:
        """Join the other ranks in a group of its own; rank 0 alone writes through the store, whose lock it holds."""
        self._store = store
        group = dist.new_group(timeout=timeout, backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # of all ranks, of which this is one
        self._group = group
        self._pending: _Pending | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Begin a snapshot, once the one before is finished; tensors and record may be changed afterwards.

        Names are the same on every rank. A DTensor is saved whole, from the parts of all, another tensor as one of the
        ranks has it. The record holds values that are no tensors; that of rank 0 counts. Raises what `wait` raises, and
        OSError on every rank where this snapshot cannot be begun.
        """
        self.wait()
        folder = self._from_rank_0(lambda: self._store.begin(step) / PARTS)
        parts = {name: tensor.detach() for name, tensor in tensors.items()}
        written = async_save(parts, checkpoint_id=folder, process_group=self._group)
        assert isinstance(written, Future)
        self._pending = _Pending(step, copy.deepcopy(record), written)

    def poll(self) -> None:
        """Put what all ranks have written in its place: rank 0 does, nobody waits; `wait` tells what failed."""
        pending = self._pending
        if dist.get_rank() == 0 and pending and not pending.over and pending.written.done():
            self._finish(pending)

    def wait(self) -> None:
        """Finish the snapshot that is being written, if there is one.

        OSError, the same on every rank: it was not saved, and nothing of it is left. RuntimeError: another rank is gone
        or was silent for too long.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.written.exception()  # returns when this rank has written
            self._from_rank_0(lambda: self._outcome(pending))

    def _outcome(self, pending: _Pending) -> None:
        """Complete a snapshot if that is not done, and raise its error."""
        if not pending.over:
            self._finish(pending)
        if pending.error is not None:
            raise pending.error

    def _finish(self, pending: _Pending) -> None:
        """Complete or abandon a snapshot; its error is kept for `_outcome`."""
        failed = pending.written.exception()
        try:
            if failed is not None:
                self._store.abandon(pending.step)
                raise self._store.explained(_first(failed), pending.step) from failed
            self._store.complete(pending.step, pending.record)
        except Exception as error:
            pending.error = error
        pending.over = True

    def _from_rank_0(self, work: Callable[[], Made]) -> Made:
        """Call `work` on rank 0, and return its result or raise its error on every rank."""
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                made = [work()]
            except Exception as error:
                made = [error]
        dist.broadcast_object_list(made, src=0, group=self._group)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]


def _first(failed: BaseException) -> OSError:
    """Return the error of the first rank that had one."""
    if not isinstance(failed, CheckpointException):
        return OSError(errno.EIO, printable(f"{type(failed).__name__}: {failed}"))
    rank, (error, _) = min(failed.failures.items())
    if isinstance(error, OSError):
        return OSError(error.errno, f"rank {rank}: {error.strerror}")
    return OSError(errno.EIO, printable(f"rank {rank}: {type(error).__name__}: {error}"))
