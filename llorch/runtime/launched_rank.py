"""What a launcher (torchrun, or ours) tells a process that is one of several: which one it is, and who may speak.

Source: torch.distributed.run, "Environment Variables".
"""

import os

OURS = "llorch-"  # the id of a run that we launched begins so
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_stderr: list[int] = []  # as it was, of a rank that does not speak


def is_rank() -> bool:
    """Tell if a launcher started this process as a rank."""
    return all(name in os.environ for name in _VARIABLES)


def is_launched_by_us() -> bool:
    """Tell if llorch launched this rank; the process that launched it reports how it ended."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS)


def n_restarts() -> int:
    """Return how often a launcher has started these ranks again after one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def ranks_here(n_ranks: int) -> range:
    """List the ranks of this machine."""
    n_here = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return range(first, first + n_here)


def own_device(kind: str) -> str:
    """Name the device of this rank, `cuda:3` of `cuda`; the CPU belongs to all."""
    return kind if kind == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"


def only_first_speaks() -> None:
    """Let nobody read what a rank says but those of the first."""
    if os.environ["RANK"] == "0" or _stderr:
        return
    _stderr.append(os.dup(2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def speak() -> None:
    """Let this rank say on stderr why it ends."""
    if _stderr:
        os.dup2(_stderr.pop(), 2)
