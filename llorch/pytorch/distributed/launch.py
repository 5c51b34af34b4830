"""Processes (ranks) of a device mesh: launch them with torch's own launcher, join the mesh, communicate on it.

`on_ranks` calls a function in n processes. The function calls `start` to join the mesh, and `leave` at its end. If one
rank fails, its error goes to the others by `Ranks.ending`, see `failure`; the launcher stops ranks that still run.

Source: torch.distributed.launcher, which `torchrun` calls; torch.distributed.rendezvous for the store.
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
from llorch.runtime.launched_rank import OURS, n_restarts, rank_device, silence_other_ranks
from llorch.training.resume import differences

TIMEOUT = timedelta(minutes=5)  # time that a rank waits for another rank, and for ranks to end after a signal
Result = TypeVar("Result")


class RanksEnded(Exception):
    """End of the ranks with an exit code; one of them has printed the reason, or a signal ended the launcher."""

    def __init__(self, exit_code: int) -> None:
        """Store the exit code."""
        super().__init__(f"the ranks ended with code {exit_code}")
        self.exit_code = exit_code


def on_ranks(n_ranks: int, work: Callable[..., Any], *arguments: Any, timeout: timedelta = TIMEOUT) -> Any:
    """Call a function in `n_ranks` processes of this machine; return the result of rank 0. Other ranks are silent.

    Args:
        n_ranks: The number of processes.
        work: The function to call; it must be importable from a module.
        arguments: The arguments of the function.
        timeout: Time for ranks to end after SIGTERM or SIGINT, which this process forwards.

    Raises:
        EngineDied: A rank died or raised; the launcher stops the other ranks.
        RanksEnded: A rank exited with a code, or this process received SIGTERM or SIGINT.
    """
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # llorch reports failures itself
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    try:
        with _restored_handlers(), TemporaryDirectory(prefix="llorch-", ignore_cleanup_errors=True) as logs:
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
def _restored_handlers() -> Iterator[None]:
    """Restore the signal handlers of this process, because the launcher replaces them."""
    saved_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in saved_handlers.items():
            signal.signal(number, handler)


def _error_of_rank(error: ChildFailedError, n_ranks: int) -> Exception:
    """Return the exception that explains how the first failed rank ended: exit code, exception or signal."""
    rank, failure = min(error.failures.items(), key=lambda rank_failure: rank_failure[1].timestamp)
    message: Any = failure.message
    if isinstance(message, dict):
        return EngineDied(f"rank {rank} of {n_ranks}: {message['message']}")
    if failure.exitcode > 0:
        return RanksEnded(failure.exitcode)
    return EngineDied(f"rank {rank} of {n_ranks}: its process ended ({message})")


def _rank(work: Callable[..., Any], *arguments: Any) -> Any:
    silence_other_ranks()
    return work(*arguments)


def start(axes: Mapping[str, int], *, device: str = "cpu", timeout: timedelta = TIMEOUT) -> DeviceMesh:
    """Join a mesh with the given axes as one of its ranks; on CUDA each rank uses the device of its local rank.

    Raises:
        UserError: On all ranks: the number of ranks differs from the mesh.
        MissingDevice: This rank does not have the device.
    """
    target(rank_device(device))  # raises if the device is missing
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # silence its messages about redistribution
    store, rank, n_ranks = next(rendezvous("env://", timeout=timeout))
    # torchrun may restart lost ranks with the same store, which still has the addresses of the ended processes
    failures = PrefixStore(f"failures of start {n_restarts()}", store)
    Ranks.ending, Ranks.timeout = Ending(failures, rank=rank, n_ranks=n_ranks, timeout=timeout), timeout
    messages = PrefixStore(f"messages of start {n_restarts()}", store)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=messages, rank=rank, world_size=n_ranks, timeout=timeout)
    if n_ranks != math.prod(axes.values()):
        shape = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise UserError(f"mesh: expected {math.prod(axes.values())} ranks for {shape}, got {n_ranks}")
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)  # its default is different
    return mesh


class Ranks:
    """View of one process on the ranks of its run: itself alone, or all of a mesh, which make the same calls."""

    ending: Ending | None = None  # of the class: `cli.mesh` explains any error with it; None before `start`
    timeout: timedelta = TIMEOUT  # of communication

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """Create the view of a rank of a mesh, or with None of a single process."""
        self.mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()
        self.is_first = self.rank == 0

    def first(self, work: Callable[[], Result]) -> Result:
        """Call `work` on the first rank and return its result on all; if it raises, others raise RankFailed."""
        if self.mesh is None:
            return work()
        outcome: list[Any] = [None, False]
        try:
            outcome = [work() if self.is_first else None, True]
        finally:
            dist.broadcast_object_list(outcome, src=0)
        if not outcome[1]:
            raise RankFailed("rank 0 failed", None)
        return outcome[0]

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks."""
        maximum = torch.tensor(number)
        if self.mesh is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return int(maximum)

    def require_alike(self, inputs: Mapping[str, Any]) -> None:
        """Raise UserError on all ranks if the values of a rank differ from those of the first."""
        if self.mesh is None:
            return
        rank_values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rank_values, json.loads(json.dumps(inputs)))
        for rank, rank_value in enumerate(rank_values):
            if changes := differences(rank_values[0], rank_value, sides=("rank 0 has", f"rank {rank}")):
                change = next(iter(changes.values()))
                raise UserError(
                    f"mesh: expected equal inputs on all ranks, got {change}; give all ranks equal files and versions"
                )


def axes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Return the number of ranks of each axis of a mesh, by the name of the axis."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def named_on(target: Target, mesh: DeviceMesh) -> str:
    """Return the name of a target on a mesh in result rows, `torch-cpu-float32-dp2-tp2`."""
    return "-".join([str(target), *(f"{axis}{size}" for axis, size in axes_of(mesh).items() if size > 1)])


def summed(part: Tensor, axis_mesh: DeviceMesh | None) -> Tensor:
    """Sum a tensor in place over the ranks of one axis of a mesh, `mesh["tp"]` (all-reduce); None changes nothing."""
    if axis_mesh is not None:
        dist.all_reduce(part, group=axis_mesh.get_group())
    return part


def gathered(part: Tensor, dim: int, axis_mesh: DeviceMesh) -> Tensor:
    """Concatenate the parts of the ranks of one axis of a mesh, along dimension `dim` of the tensor (all-gather)."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis_mesh.size())]
    dist.all_gather(parts, part.contiguous(), group=axis_mesh.get_group())
    return torch.cat(parts, dim)


def leave() -> None:
    """Leave the process group, so that no rank waits for this rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
