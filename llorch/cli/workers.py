"""Jobs that are done ahead by processes of their own, copies of this one: as many at once as there are cores."""

import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from llorch.threads import limited

T = TypeVar("T")
GRACE = 5.0  # seconds for a process to remove its temporary files
Jobs = Mapping[Any, Callable[[], T]]  # by a name of theirs, in the order in which they are wanted


class Workers(Generic[T]):
    """They take jobs in order. Where none took one, or it failed there, it is done here when its result is asked for.

    So an error is raised where it always was, by code that runs here. Off Linux no process is started: only there are
    libraries of linear algebra safe to copy.
    """

    def __init__(self, jobs: Jobs[T], n_processes: int) -> None:
        """Start processes, if there are to be several of them and several jobs."""
        self.n_processes = min(len(jobs), n_processes) if sys.platform == "linux" else 1
        self.jobs, self._next = jobs, iter(jobs)
        self._busy: dict[Any, Any] = {}  # channel to the job that its process is at
        self._done: dict[Any, T | None] = {}
        self._processes: list[BaseProcess] = []
        for _ in range(self.n_processes if self.n_processes > 1 else 0):
            self._start()

    def _start(self) -> None:
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self.jobs, theirs), daemon=True)
        with warnings.catch_warnings():  # of threads: they are those of BLAS, which sees to them
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._processes.append(process)
        self._hand_out(ours)

    def _hand_out(self, channel: Connection) -> None:
        job = next(self._next, None)
        if job is not None:
            self._busy[channel] = job
            channel.send(job)

    def result(self, job: Any) -> T:
        """Of a job; waits for the process that is at it."""
        while job not in self._done and self._busy:
            ready: list[Any] = wait([*self._busy])
            for channel in ready:
                taken = self._busy.pop(channel)
                with suppress(EOFError, OSError):  # the process did not survive
                    self._done[taken] = channel.recv()
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


def _see_off(process: BaseProcess) -> None:
    """Wait until it ended; an exception that SIGTERM raised below a callback of a library in C never got far."""
    for end in (process.terminate, process.terminate, process.kill):
        process.join(GRACE)
        if process.exitcode is not None:
            return
        end()
    process.join()


def _work(jobs: Jobs, channel: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whose Ctrl-C it is ends this process
    with suppress(EOFError, OSError), limited(1):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that temporary files are removed
        while True:
            job = channel.recv()
            try:
                made = jobs[job]()
            except Exception:
                made = None
            channel.send(made)
