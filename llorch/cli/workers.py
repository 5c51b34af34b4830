"""Run jobs ahead of time in forked copies of this process: as many at once as there are cores."""

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from llorch.runtime.channel import Channel, ready
from llorch.runtime.threads import limit_threads
from llorch.runtime.worker import Worker

T = TypeVar("T")
GRACE = 5.0  # seconds for a process to remove its temporary files
Jobs = Mapping[Any, Callable[[], T]]  # by name, in the order of use


class Workers(Generic[T]):
    """Pool of forked processes that take jobs in order. A job that no process took, or that failed there, runs here.

    So the caller gets every error from code in this process. Processes start on Linux only: elsewhere the libraries of
    linear algebra are not safe to fork.
    """

    def __init__(self, jobs: Jobs[T], n_processes: int) -> None:
        """Start processes, if there are to be several of them and several jobs."""
        self.n_processes = min(len(jobs), n_processes) if sys.platform == "linux" else 1
        self.jobs, self._next = jobs, iter(jobs)
        self._busy: dict[Channel, Any] = {}  # channel of a process to its current job
        self._done: dict[Any, T | None] = {}
        self._processes: list[Worker] = []
        for _ in range(self.n_processes if self.n_processes > 1 else 0):
            self._processes.append(Worker(lambda channel: _work(jobs, channel), dies_by=signal.SIGTERM))
            self._hand_out(self._processes[-1].channel)

    def _hand_out(self, channel: Channel) -> None:
        """Send the next job, if there is one, to a free process."""
        job = next(self._next, None)
        if job is not None:
            self._busy[channel] = job
            with suppress(OSError):  # the process died; `result` runs the job here
                channel.send_object(job)

    def result(self, job: Any) -> T:
        """Return the result of a job; wait for the process that computes it."""
        while job not in self._done and self._busy:
            for channel in ready(self._busy):
                finished_job = self._busy.pop(channel)
                with suppress(EOFError, OSError):  # the process died
                    self._done[finished_job] = channel.receive_object()
                    self._hand_out(channel)
        output = self._done.pop(job, None)
        return self.jobs[job]() if output is None else output

    def __enter__(self) -> "Workers[T]":
        return self

    def __exit__(self, *_exception: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            _wait_for_exit(process)


def _wait_for_exit(process: Worker) -> None:
    """Wait for the end; repeat SIGTERM: its exception is dropped if raised in a callback from a C library."""
    for _ in range(2):
        if process.wait(GRACE) is None:
            process.terminate()
    process.wait(GRACE)
    process.end()


def _work(jobs: Jobs, channel: Channel) -> None:
    with suppress(EOFError, OSError), limit_threads(1):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # raises SystemExit, so that temporary files are removed
        while True:
            job = channel.receive_object()
            try:
                output = jobs[job]()
            except Exception:
                output = None
            channel.send_object(output)
