"""The processes of a device mesh: as many of one function as there are ranks, started by torch's own launcher.

Source: torch.distributed.launcher, which is what `torchrun` calls.
"""

import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from llorch.errors import EngineDied

TIMEOUT = timedelta(minutes=5)  # that a rank waits for another
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # by which a launcher tells a rank


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return all(name in os.environ for name in VARIABLES)


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
        raise EngineDied(f"rank {rank} of {n_ranks}: its process ended ({failure.message})") from None
    except SignalException:
        raise KeyboardInterrupt from None


def _rank(work: Callable[..., Any], *arguments: Any) -> Any:
    if os.environ["RANK"] != "0":
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
    return work(*arguments)


def start(axes: Mapping[str, int]) -> DeviceMesh:
    """Join the other ranks on the CPU, as one of a mesh with such axes.

    Raises:
        ValueError: There are not as many ranks as the mesh has.
    """
    n_ranks, wanted = int(os.environ["WORLD_SIZE"]), math.prod(axes.values())
    if n_ranks != wanted:
        shape = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"mesh: expected {wanted} ranks for {shape}, got {n_ranks}")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
