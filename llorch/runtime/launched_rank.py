"""Settings that the launcher (torchrun or llorch) gives to a rank, a process of a distributed run; only rank 0 prints.

Source: torch.distributed.run, "Environment Variables".
"""

import os

OURS = "llorch-"  # prefix of the run id if llorch is the launcher
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by a launcher
_stderr: list[int] = []  # original stderr of a silenced rank


def is_rank() -> bool:
    """Check if a launcher started this process as a rank."""
    return all(name in os.environ for name in _VARIABLES)


def is_launched_by_llorch() -> bool:
    """Check if llorch launched this rank; the launching process then reports its exit."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS)


def n_restarts() -> int:
    """Return the number of restarts of these ranks after a rank was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def local_ranks(n_ranks: int) -> range:
    """Return the ranks of this machine."""
    n_here = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return range(first, first + n_here)


def rank_device(kind: str) -> str:
    """Return the device of this rank, `cuda:3` for `cuda`; all ranks share `cpu`."""
    return kind if kind == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"


def silence_other_ranks() -> None:
    """Redirect stdout and stderr of every rank but rank 0 to the null device."""
    if os.environ["RANK"] == "0" or _stderr:
        return
    _stderr.append(os.dup(2))
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)


def restore_stderr() -> None:
    """Restore stderr, so that this rank can print why it ends."""
    if _stderr:
        os.dup2(_stderr.pop(), 2)
