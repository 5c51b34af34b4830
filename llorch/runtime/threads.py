"""Number of CPU threads: one for a small model, whose threads would mostly wait for each other.

A step of a small model is hundreds of products of some microseconds each. If another program is busy, every product
waits until the second thread gets its core again: twenty training steps took 152 s instead of 40 s.

The command line sets the number while a command runs. llorch as a library does not change it; a program can use
`with limit_threads(1):`.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_info, threadpool_limits

SMALL = 20_000_000  # parameters
SOFT = 1  # omp_pause_soft of OpenMP: end the threads, keep the library's state
_LIMITS: list[int] = []  # limits of nested `limit_threads`, the innermost last
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # the user's number of threads


def is_small(n_parameters: int) -> bool:
    """Check if a model is too small to gain from a second thread."""
    return n_parameters < SMALL


def n_threads_for(n_parameters: int) -> int:
    """Return the number of threads for a reference engine: one for a small model, else all cores of this process."""
    return 1 if is_small(n_parameters) else n_cores()


def n_requested() -> int | None:
    """Return the number of threads set by `limit_threads` or the environment; else None."""
    if _LIMITS:
        return _LIMITS[-1]
    settings = (os.environ.get(name, "") for name in VARIABLES)
    return next((int(setting) for setting in settings if setting.isdigit() and int(setting) > 0), None)


def n_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_waiting_threads() -> None:
    """End the OpenMP threads that wait for this thread's next product, before another thread computes.

    libgomp counts waiting threads: if they outnumber the cores, none spins, and every product must wake its threads.
    """
    for pool in threadpool_info():
        if pool["user_api"] == "openmp":
            pause = getattr(ctypes.CDLL(pool["filepath"]), "omp_pause_resource_all", None)  # since OpenMP 5
            if pause is not None:
                pause(SOFT)


@contextmanager
def limit_threads(n: int) -> Iterator[None]:
    """Limit NumPy, engines and an already imported torch to `n` threads within the context."""
    with threadpool_limits(n, user_api="blas"), _torch_limited(n):
        _LIMITS.append(n)
        try:
            yield
        finally:
            _LIMITS.pop()


@contextmanager
def _torch_limited(n: int) -> Iterator[None]:
    if sys.modules.get("torch") is None:  # not imported, or blocked from import
        yield
        return
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
