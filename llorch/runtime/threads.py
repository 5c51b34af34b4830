"""How many CPU threads compute: one for a small model, whose threads would mostly wait for each other.

A step of a small model is hundreds of products of some microseconds each. Beside another busy program every one of them
waits until the other thread gets its core again: twenty training steps were seen to take 152 s instead of 40.

The command line sets this for as long as a command runs. A program that imports llorch keeps what it has set itself;
`with limited(1):` is for it, too.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_info, threadpool_limits

SMALL = 20_000_000  # parameters
SOFT = 1  # omp_pause_soft: what the library has set up stays
_LIMITS: list[int] = []  # of `limited`, the innermost last
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # by which a user says how many


def is_small(n_parameters: int) -> bool:
    """Tell if a model gains nothing from a second thread."""
    return n_parameters < SMALL


def n_threads_for(n_parameters: int) -> int:
    """Choose the threads of a reference engine: one for a small model, else as many as this process may run."""
    return 1 if is_small(n_parameters) else n_cores()


def n_asked() -> int | None:
    """Return the number of threads that the user asks for, by `limited` or the environment; else None."""
    if _LIMITS:
        return _LIMITS[-1]
    said = (os.environ.get(name, "") for name in VARIABLES)
    return next((int(n) for n in said if n.isdigit() and int(n) > 0), None)


def n_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def let_go() -> None:
    """End the OpenMP threads that wait for this thread's next product, because another thread goes on.

    GNU's library counts all that wait. Where they are more than the cores, none spins between two products.
    """
    for pool in threadpool_info():
        if pool["user_api"] == "openmp":
            pause = getattr(ctypes.CDLL(pool["filepath"]), "omp_pause_resource_all", None)  # since OpenMP 5
            if pause is not None:
                pause(SOFT)


@contextmanager
def limited(n: int) -> Iterator[None]:
    """Let NumPy, engines, and torch where it is imported by now, compute with `n` threads; puts back the old number."""
    with threadpool_limits(n, user_api="blas"), _torch_limited(n):
        _LIMITS.append(n)
        try:
            yield
        finally:
            _LIMITS.pop()


@contextmanager
def _torch_limited(n: int) -> Iterator[None]:
    if sys.modules.get("torch") is None:  # not imported, or kept from being so
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
