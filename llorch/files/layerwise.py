"""Layerwise execution of several passes: all passes finish a layer before any pass starts the next.

A layer's matrices are decoded once for all passes, and only one layer is in memory. Each pass has its own control flow,
so it runs in its own thread. Only one of these threads runs at a time.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from threading import Semaphore, Thread
from typing import Generic, TypeVar

from llorch.files import Weights
from llorch.ops.numerics import DtypeName
from llorch.runtime.memory import available_memory

_OVERHEAD = 1.2  # factor on the weights' bytes, for decoding buffers and activations
T = TypeVar("T")
Turn = Callable[[], None]  # a job calls it at the end of each layer; it returns when the next layer may start


class _Ended(BaseException):
    """Exit of a job after another job failed; a BaseException, because a job might handle an Exception."""


class LayerwiseJobs(Generic[T]):
    """Jobs that run alternately, each to the end of its next layer."""

    def __init__(self, jobs: Sequence[Callable[[Turn], T]]) -> None:
        """Prepare; each job (a forward pass) gets a function that waits until all other jobs finish the layer."""
        self._jobs = jobs
        self._gates = [Semaphore(0) for _ in jobs]
        self._waiting = deque(range(len(jobs)))
        self._returned: dict[int, T] = {}
        self._error: BaseException | None = None

    def run(self) -> list[T]:
        """Run the jobs to their end; return their return values in order.

        Raises the exception of the first job that fails; the other jobs end at their next turn.
        """
        threads = [
            Thread(target=copy_context().run, args=(self._work, index), daemon=True) for index in range(len(self._jobs))
        ]
        for thread in threads:
            thread.start()
        self._next()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # such as Ctrl-C
            self._error = self._error or error
        if self._error is not None:
            raise self._error
        return [self._returned[index] for index in range(len(self._jobs))]

    def _work(self, index: int) -> None:
        """Run a job in its thread; store its return value or the first error, then resume the next job."""
        try:
            self._wait(index)
            self._returned[index] = self._jobs[index](partial(self._turn, index))
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._next()

    def _turn(self, index: int) -> None:
        """Wait until all other jobs finish the layer."""
        self._waiting.append(index)
        self._next()
        self._wait(index)

    def _next(self) -> None:
        """Resume the job that waits longest."""
        if self._waiting:
            self._gates[self._waiting.popleft()].release()

    def _wait(self, index: int) -> None:
        """Wait for the job's turn; end the job if another job failed."""
        self._gates[index].acquire()
        if self._error is not None:
            raise _Ended


def fits(weights: Weights, dtype: DtypeName) -> bool:
    """Check if the whole model fits into free memory."""
    return _OVERHEAD * _bytes_of_dtype(dtype) * sum(_count_elements(weights).values()) <= available_memory()


def largest_part(weights: Weights, dtype: DtypeName) -> float:
    """Return the bytes of the largest layer or output matrix: the memory need of layerwise execution."""
    return _OVERHEAD * _bytes_of_dtype(dtype) * max(_count_elements(weights).values())


def _bytes_of_dtype(dtype: DtypeName) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _count_elements(weights: Weights) -> Counter[str]:
    """Count the elements of each layer, and of each weight outside the layers."""
    counts: Counter[str] = Counter()
    for name in weights:
        counts[name.rpartition(".")[0] or name] += math.prod(weights.shape(name))
    return counts
