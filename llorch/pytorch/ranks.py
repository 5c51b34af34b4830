"""The processes of a device mesh: as many of one function as there are ranks, started by torch's own launcher.

A rank that fails leaves its line and its exit code in the store of the launcher, before it ends; the others, whose next
message then does not arrive, end with the same.

Source: torch.distributed.launcher, which is what `torchrun` calls; torch.distributed.rendezvous for the store.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from llorch.errors import EngineDied, RankFailed

TIMEOUT = timedelta(minutes=5)  # that a rank waits for another
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # by which a launcher tells a rank
GRACE = timedelta(seconds=5)  # in which a rank that failed has left its line
Made = TypeVar("Made")


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return all(name in os.environ for name in VARIABLES)


def n_restarts() -> int:
    """How often a launcher has started these ranks anew, after one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def on_ranks(n_ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in so many processes of this machine.

    Args:
        n_ranks: How many.
        work: What they call; a module's, as processes import it.
        arguments: What it is given.

    Returns:
        What rank 0 returned; only that one prints.

    Raises:
        EngineDied: A rank did not survive; the others are ended.
        KeyboardInterrupt: The user ended it.
    """
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=n_ranks, run_id=uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0, monitor_interval=0.05,
    )  # fmt: skip
    try:
        return elastic_launch(config, _rank)(work, *arguments)[0]
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        said: Any = failure.message
        reason = said["message"] if isinstance(said, dict) else said
        raise EngineDied(f"rank {rank} of {n_ranks}: its process ended ({reason})") from None
    except SignalException:
        raise KeyboardInterrupt from None


def only_first_speaks() -> None:
    """Let nobody read what a rank says but those of the first."""
    if os.environ["RANK"] != "0":
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)


def _rank(work: Callable[..., Any], *arguments: Any) -> Any:
    only_first_speaks()
    return work(*arguments)


def start(axes: Mapping[str, int], *, device: str = "cpu", timeout: timedelta = TIMEOUT) -> DeviceMesh:
    """Join the other ranks, as one of a mesh with such axes; on CUDA each rank has the device of its local number.

    Raises:
        ValueError: There are not as many ranks as the mesh has.
    """
    n_ranks, wanted = int(os.environ["WORLD_SIZE"]), math.prod(axes.values())
    if n_ranks != wanted:
        shape = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"mesh: expected {wanted} ranks for {shape}, got {n_ranks}")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it tells how parts are put together
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", store=PrefixStore("messages", store), rank=rank,
        world_size=n_ranks, timeout=timeout,
    )  # fmt: skip
    Ranks.store = PrefixStore(f"failures of start {n_restarts()}", store)
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


class Ranks:
    """The processes that make a run: one alone, or all of a mesh, which call the same methods in the same order."""

    store: Any = None  # where a rank that fails leaves its line

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """Of a mesh, or alone."""
        self.mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()
        self.is_first = self.rank == 0

    def first(self, work: Callable[[], Made]) -> Made:
        """What the first rank makes, for all."""
        made = [work() if self.is_first else None]
        if self.mesh is not None:
            dist.broadcast_object_list(made, src=0)
        return made[0]  # type: ignore[return-value] (rank 0 made it)

    def largest(self, number: int) -> int:
        """The largest number of all ranks."""
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
            for name in sorted(found[0].keys() | other.keys()):
                if found[0].get(name) != other.get(name):
                    raise ValueError(
                        f"mesh: expected the same {name} on all ranks, got {found[0].get(name)!s:.60} on rank 0 and "
                        f"{other.get(name)!s:.60} on rank {rank}; give all of them the same files and versions"
                    )

    def outcome(self, error: BaseException, code: int, line: str) -> BaseException:
        """What a run ends with on every rank: what the first rank that failed raised."""
        if self.store is None or isinstance(error, RankFailed):
            return error
        lost = isinstance(error, (dist.DistError, RuntimeError)) and _is_of_messages(error)
        said = self._found() if lost else self._left(code, line)
        if said is None:
            return RankFailed(f"rank {self.rank}: lost the other ranks, or waited too long for them: {error}", None)
        return error if said["rank"] == self.rank else RankFailed(f"rank {said['rank']}: {said['line']}", said["code"])

    def _left(self, code: int, line: str) -> Mapping[str, Any]:
        """Leave a line, unless somebody was faster; the one that stands there."""
        mine = json.dumps({"rank": self.rank, "code": code, "line": line})
        return json.loads(self.store.compare_set("first", "", mine))

    def _found(self) -> Mapping[str, Any] | None:
        """What another rank has left."""
        try:
            self.store.wait(["first"], GRACE)
            return json.loads(self.store.get("first"))
        except (dist.DistError, RuntimeError):
            return None


def _is_of_messages(error: BaseException) -> bool:
    """Whether a message was not sent or did not arrive."""
    words = ("gloo", "Connection", "Timed out", "timed out", "NCCL", "recv", "Socket")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def summed(part: Tensor, ranks: DeviceMesh | None) -> Tensor:
    """The sum over the ranks of one axis, in place."""
    if ranks is not None:
        dist.all_reduce(part, group=ranks.get_group())
    return part


def leave() -> None:
    """Say farewell to the other ranks, so that none of them waits."""
    if dist.is_initialized():
        dist.destroy_process_group()
