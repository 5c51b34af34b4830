"""Jobs that are done ahead by processes of their own, copies of this one: as many at once as there are cores."""

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from llorch.runtime.channel import Channel, ready
from llorch.runtime.threads import limited
from llorch.runtime.worker import Worker

T = TypeVar("T")
GRACE = 5.0  # seconds for a process to remove its temporary files
Jobs = Mapping[Any, Callable[[], T]]  # by name, in the order in which their results are used


class Workers(Generic[T]):
    """They take jobs in order. Where none took one, or it failed there, it is done here when its result is asked for.

    So an error is raised where it always was, by code that runs here. Off Linux no process is started: only there are
    libraries of linear algebra safe to copy.
    """

    def __init__(self, jobs: Jobs[T], n_processes: int) -> None:
        """Start processes, if there are to be several of them and several jobs."""
        self.n_processes = min(len(jobs), n_processes) if sys.platform == "linux" else 1
        self.jobs, self._next = jobs, iter(jobs)
        self._busy: dict[Channel, Any] = {}  # channel to the job that its process is at
        self._done: dict[Any, T | None] = {}
        self._processes: list[Worker] = []
        for _ in range(self.n_processes if self.n_processes > 1 else 0):
            self._processes.append(Worker(lambda channel: _work(jobs, channel), dies_by=signal.SIGTERM))
            self._hand_out(self._processes[-1].channel)

    def _hand_out(self, channel: Channel) -> None:
        job = next(self._next, None)
        if job is not None:
            self._busy[channel] = job
            with suppress(OSError):  # the process did not survive, as `result` will find
                channel.send_object(job)

    def result(self, job: Any) -> T:
        """Return the result of a job; wait for the process that computes it."""
        while job not in self._done and self._busy:
            for channel in ready(self._busy):
                taken = self._busy.pop(channel)
                with suppress(EOFError, OSError):  # the process did not survive
                    self._done[taken] = channel.receive_object()
                    self._hand_out(channel)
        made = self._done.pop(job, None)
        return self.jobs[job]() if made is None else made

    def __enter__(self) -> "Workers[T]":
        return self

    def __exit__(self, *_exception: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            _see_off(process)


def _see_off(process: Worker) -> None:
    """Wait until it ended; an exception that SIGTERM raised below a callback of a library in C never got far."""
    for _ in range(2):
        if process.wait(GRACE) is None:
            process.terminate()
    process.wait(GRACE)
    process.end()


def _work(jobs: Jobs, channel: Channel) -> None:
    with suppress(EOFError, OSError), limited(1):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that temporary files are removed
        while True:
            job = channel.receive_object()
            try:
                made = jobs[job]()
            except Exception:
                made = None
            channel.send_object(made)
