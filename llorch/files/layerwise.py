"""Passes that go through a model together: each finishes a layer before any begins the next.

A layer's matrices are decoded once for all of them, and only those of one layer need memory. Each pass keeps its own
control flow, so it runs in a thread of its own. Only one of these threads runs at a time.
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

_ROOM = 1.2  # times the weights of a model: what is decoded while they load, and activations
T = TypeVar("T")
Turn = Callable[[], None]  # what a job calls at the end of each layer


class _Ended(BaseException):
    """Unwinds a job whose fellow failed; not an Exception, which a job might handle."""


class LayerwiseJobs(Generic[T]):
    """Jobs that run in turn, each up to the end of its next layer."""

    def __init__(self, jobs: Sequence[Callable[[Turn], T]]) -> None:
        """Prepare; each job is given `turn`, which lets all the others finish the layer first."""
        self._jobs = jobs
        self._gates = [Semaphore(0) for _ in jobs]
        self._waiting = deque(range(len(jobs)))
        self._results: dict[int, T] = {}
        self._error: BaseException | None = None

    def run(self) -> list[T]:
        """Run the jobs to their ends; return what they returned, in their order.

        Raised is what the first to fail raised; the others end at their next turn.
        """
        threads = [
            Thread(target=copy_context().run, args=(self._work, at), daemon=True) for at in range(len(self._jobs))
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
        return [self._results[at] for at in range(len(self._jobs))]

    def _work(self, at: int) -> None:
        """Run a job in its thread; keep its result or the first error, then let the next job go on."""
        try:
            self._wait(at)
            self._results[at] = self._jobs[at](partial(self._turn, at))
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._next()

    def _turn(self, at: int) -> None:
        """Let all other jobs finish the layer, then go on."""
        self._waiting.append(at)
        self._next()
        self._wait(at)

    def _next(self) -> None:
        """Let the job that waits longest go on."""
        if self._waiting:
            self._gates[self._waiting.popleft()].release()

    def _wait(self, at: int) -> None:
        """Wait for the job's turn; end the job if another one failed."""
        self._gates[at].acquire()
        if self._error is not None:
            raise _Ended


def fits(weights: Weights, dtype: DtypeName) -> bool:
    """Tell if a model as a whole fits the memory that is free."""
    return _ROOM * _bytes_of_dtype(dtype) * sum(_elements(weights).values()) <= available_memory()


def largest_part(weights: Weights, dtype: DtypeName) -> float:
    """Return the bytes of the largest layer, or of the output matrix: the need of a model that is read in parts."""
    return _ROOM * _bytes_of_dtype(dtype) * max(_elements(weights).values())


def _bytes_of_dtype(dtype: DtypeName) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _elements(weights: Weights) -> Counter[str]:
    """Count the numbers of each layer, and of each weight outside the layers."""
    parts: Counter[str] = Counter()
    for name in weights:
        parts[name.rpartition(".")[0] or name] += math.prod(weights.shape(name))
    return parts
