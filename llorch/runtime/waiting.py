"""Waiting of threads for each other: asleep, so that a thread of another library gets the core at once.

NumPy's OpenBLAS and the OpenMP of the compiled kernels have threads of their own. While those of one library wait
actively, the other's wait for the cores: a prompt of 128 tokens takes five times as long (a published 0.5B file in
Q4_K_M, two threads). The libraries read these variables when they load.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

ASLEEP = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "3000",  # iterations, about 0.1 ms: longer than the pause between two products of a token
    "OPENBLAS_THREAD_TIMEOUT": "4",  # 2^4 cycles, the least
}


def wait_asleep() -> None:
    """Make threads of libraries that are loaded from now on sleep soon, unless the user's variables say otherwise."""
    for name in ASLEEP if "OMP_WAIT_POLICY" not in os.environ else ("OPENBLAS_THREAD_TIMEOUT",):
        os.environ.setdefault(name, ASLEEP[name])


@contextmanager
def loaded_asleep() -> Iterator[None]:
    """Set the variables of `wait_asleep` for libraries that are loaded in the block, not for other programs."""
    before = {name: os.environ.get(name) for name in ASLEEP}
    wait_asleep()
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
