"""The processes of a device mesh: as many of one function as there are ranks, started by torch's own launcher.

`failure` ends all of them where one fails.

Source: torch.distributed.launcher, which is what `torchrun` calls; torch.distributed.rendezvous for the store.
"""

import json
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from llorch.pytorch.device import Target, target
from llorch.pytorch.distributed.failure import Ending
from llorch.runtime.errors import EngineDied, RankFailed, UserError
from llorch.runtime.launched_rank import OURS, n_restarts, only_first_speaks, own_device
from llorch.training.resume import differences

TIMEOUT = timedelta(minutes=5)  # that a rank waits for another
Made = TypeVar("Made")


class RanksEnded(Exception):
    """Ranks that ended with an exit code of their own, and have said why."""

    def __init__(self, exit_code: int) -> None:
        """Keep the exit code."""
        super().__init__(f"the ranks ended with code {exit_code}")
        self.exit_code = exit_code


def on_ranks(n_ranks: int, work: Callable[..., Any], *arguments: Any, timeout: timedelta = TIMEOUT) -> Any:
    """Call a function in so many processes of this machine; return the result of rank 0, which alone prints.

    Args:
        n_ranks: The number of processes.
        work: The function that they call; a function of a module, as processes import it.
        arguments: The arguments of the function.
        timeout: Time that ranks have to end after SIGTERM or SIGINT, which this process passes on to them.

    Raises:
        EngineDied: A rank did not survive, or raised; the others are ended.
        RanksEnded: A rank left with an exit code, or a signal ended this process.
    """
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what is worth a line we say
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    try:
        with _handlers_put_back(), TemporaryDirectory(prefix="llorch-", ignore_cleanup_errors=True) as logs:
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=n_ranks, run_id=OURS + uuid4().hex, rdzv_backend="c10d",
                rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0, monitor_interval=0.05,
                signals_to_handle="SIGTERM,SIGINT", logs_specs=DefaultLogsSpecs(logs),
            )  # fmt: skip
            return elastic_launch(config, _rank)(work, *arguments)[0]
    except ChildFailedError as error:
        raise _error_of_rank(error, n_ranks) from None
    except SignalException as stopped:
        raise RanksEnded(128 + stopped.sigval) from None


@contextmanager
def _handlers_put_back() -> Iterator[None]:
    """Put the signal handlers of this process back, because the launcher leaves different handlers behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _error_of_rank(error: ChildFailedError, n_ranks: int) -> Exception:
    """Make the exception that explains how the first failed rank ended: exit code, exception or signal."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    said: Any = failure.message
    if isinstance(said, dict):
        return EngineDied(f"rank {rank} of {n_ranks}: {said['message']}")
    if failure.exitcode > 0:
        return RanksEnded(failure.exitcode)
    return EngineDied(f"rank {rank} of {n_ranks}: its process ended ({said})")


def _rank(work: Callable[..., Any], *arguments: Any) -> Any:
    only_first_speaks()
    return work(*arguments)


def start(axes: Mapping[str, int], *, device: str = "cpu", timeout: timedelta = TIMEOUT) -> DeviceMesh:
    """Join the other ranks, as one of a mesh with such axes; on CUDA each rank has the device of its local number.

    Raises:
        ValueError: On all ranks: there are not as many as the mesh has.
        MissingDevice: This rank has no such device.
    """
    target(own_device(device))  # that it is here
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it tells how parts are put together
    store, rank, n_ranks = next(rendezvous("env://", timeout=timeout))
    failures = PrefixStore(f"failures of start {n_restarts()}", store)
    Ranks.ending, Ranks.timeout = Ending(failures, rank=rank, n_ranks=n_ranks, timeout=timeout), timeout
    messages = PrefixStore(f"messages of start {n_restarts()}", store)  # without addresses of those before
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=messages, rank=rank, world_size=n_ranks, timeout=timeout)
    if n_ranks != math.prod(axes.values()):
        shape = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise UserError(f"mesh: expected {math.prod(axes.values())} ranks for {shape}, got {n_ranks}")
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)  # which has another one by default
    return mesh


class Ranks:
    """The processes that make a run: one alone, or all of a mesh, which call the same methods in the same order."""

    ending: Ending | None = None  # of the mesh that this process has joined
    timeout: timedelta = TIMEOUT  # that it waits for a message

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """Start as a rank of a mesh, or alone."""
        self.mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()
        self.is_first = self.rank == 0

    def first(self, work: Callable[[], Made]) -> Made:
        """Call `work` on the first rank and return its result on all; if it raises, others raise RankFailed."""
        if self.mesh is None:
            return work()
        made: list[Any] = [None, False]
        try:
            made = [work() if self.is_first else None, True]
        finally:
            dist.broadcast_object_list(made, src=0)
        if not made[1]:
            raise RankFailed("rank 0 failed", None)
        return made[0]

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks."""
        found = torch.tensor(number)
        if self.mesh is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def require_alike(self, values: Mapping[str, Any]) -> None:
        """Refuse (ValueError, on all ranks) to go on where a rank has found something else than the first."""
        if self.mesh is None:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, json.loads(json.dumps(values)))
        for rank, other in enumerate(found):
            if different := differences(found[0], other, sides=("rank 0 has", f"rank {rank}")):
                what = next(iter(different.values()))
                raise UserError(
                    f"mesh: expected equal inputs on all ranks, got {what}; give all ranks equal files and versions"
                )


def axes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Return the number of ranks of each axis of a mesh, by the name of the axis."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def named_on(target: Target, mesh: DeviceMesh) -> str:
    """Return the name of a target on a mesh in rows of results, `torch-cpu-float32-dp2-tp2`."""
    return "-".join([str(target), *(f"{axis}{size}" for axis, size in axes_of(mesh).items() if size > 1)])


def summed(part: Tensor, ranks: DeviceMesh | None) -> Tensor:
    """Sum a tensor over the ranks of one axis, in place; None for `ranks` leaves the tensor unchanged."""
    if ranks is not None:
        dist.all_reduce(part, group=ranks.get_group())
    return part


def gathered(part: Tensor, axis: int, ranks: DeviceMesh) -> Tensor:
    """Gather the parts of all ranks beside each other along an axis."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.size())]
    dist.all_gather(parts, part.contiguous(), group=ranks.get_group())
    return torch.cat(parts, axis)


def leave() -> None:
    """Say farewell to the other ranks, so that none of them waits."""
    if dist.is_initialized():
        dist.destroy_process_group()
