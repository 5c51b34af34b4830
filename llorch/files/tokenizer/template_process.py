"""Chat templates at a bounded cost: they are rendered in a process that is ended when one takes too much.

The process starts with the first template, in about 70 ms, and stays: a rendering then costs about 0.1 ms more than in
this process. It ends with this process, and is started again after it was ended. Memory is limited where the system
has RLIMIT_AS (Linux does; Windows and macOS do not); time and the length of the text are limited everywhere. Time is
processor time, so a busy machine stops no template. On Windows, which has no such timer, time is wall-clock time.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llorch.runtime.worker import DEVNULL, Worker

_MAX_ANSWER = 32 << 20  # bytes: the longest text, with every character escaped, and some
_BOOT = "import sys; sys.path += sys.argv[1:]; import template_worker; template_worker.main()"
_OUT_OF_MEMORY = 4  # exit status of the worker
_OUT_OF_TIME = -signal.SIGPROF if hasattr(signal, "SIGPROF") else 1  # the same; 1 is that of faulthandler


@dataclass(frozen=True)
class TemplateLimits:
    """What a template may take."""

    seconds: float = 1.0  # of processor time, to compile and render it once
    memory: int = 512 << 20  # bytes of the process that does it
    text: int = 4 << 20  # characters that it may write


class TemplateProcess:
    """A process that renders templates, one after the other; may be asked from any thread."""

    def __init__(self, limits: TemplateLimits) -> None:
        """Keep the limits; the process starts with the first request."""
        self.limits = limits
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    @property
    def pid(self) -> int | None:
        """Number of the process; None while there is none."""
        return None if self._worker is None else self._worker.pid

    def ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """Have a template compiled or rendered (see template_worker.py).

        The answer is the worker's, or fits the way in which the process ended. What JSON cannot say is a TypeError,
        ValueError or RecursionError; ChildProcessError where the process cannot be started.
        """
        data = _encoded(request)
        with self._lock:
            worker = self._running()
            try:
                return _ask_worker(worker, data)
            except (EOFError, OSError):
                return {"code": "TemplateBudget", "message": self._breach(self._ended(worker))}
            except BaseException:  # such as Ctrl-C: an answer may come that nobody waits for
                self._ended(worker)
                raise

    def stop(self) -> None:
        """End the process, if there is one; the next request starts another."""
        with self._lock:
            if self._worker is not None:
                self._ended(self._worker)

    def forget(self) -> None:
        """Leave the process to the one that this process was forked from."""
        self._lock, self._worker = threading.Lock(), None

    def _running(self) -> Worker:
        """Return the process that renders templates; start it if none runs."""
        if self._worker is not None and not self._worker.runs:
            self._ended(self._worker)  # while nothing was asked
        if self._worker is None:
            command = _command()
            worker = self._worker = Worker(command, output=DEVNULL)
            try:
                _ask_worker(worker, _encoded(asdict(self.limits)))
            except BaseException as error:
                status = self._ended(worker)
                if isinstance(error, EOFError | OSError):
                    raise ChildProcessError(_no_start(command, status)) from None
                raise
        return self._worker

    def _ended(self, worker: Worker) -> int | None:
        """End the process if it has not, and return its exit status."""
        self._worker = None
        return worker.end()

    def _breach(self, status: int | None) -> str:
        if status == _OUT_OF_TIME:
            return f"takes over {self.limits.seconds:g} s"
        if status == _OUT_OF_MEMORY:
            return f"takes over {self.limits.memory >> 20} MiB of memory"
        return f"ended the rendering process with status {status}"


def _command() -> list[str]:
    """Make the command of an isolated Python (no user settings, no site), with the paths of this process's packages."""
    here = Path(__file__)
    places = [str(here.parent), *(str(Path(place).absolute()) for place in sys.path), str(here.parents[3])]
    return [sys.executable, "-I", "-S", "-c", _BOOT, *places]


def _no_start(command: list[str], status: int | None) -> str:
    message = f"chat templates: the rendering process ended with status {status} before it was ready"
    return f"{message}; to see why, run: {' '.join(command)}"


def _encoded(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _ask_worker(worker: Worker, data: bytes) -> dict[str, str]:
    worker.channel.send(data)
    return json.loads(worker.channel.receive(_MAX_ANSWER).decode("utf-8", "surrogatepass"))


RESIDENT = TemplateProcess(TemplateLimits())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RESIDENT.forget)
