"""Child process that renders chat templates with limits of time, memory and output.

The process starts with the first template, in about 70 ms, and stays: rendering then costs about 0.1 ms more than in
this process. It ends with this process, and restarts after a kill. Memory is limited on systems with RLIMIT_AS (Linux,
not Windows or macOS); time and text length are limited on every system. Time is processor time, so a busy machine
stops no template. On Windows, which has no such timer, time is wall-clock time.
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

_MAX_ANSWER = 32 << 20  # bytes: the longest text with every character escaped, and a margin
_BOOT = "import sys; sys.path += sys.argv[1:]; import template_worker; template_worker.main()"
_OUT_OF_MEMORY = 4  # exit status of the worker
_OUT_OF_TIME = -signal.SIGPROF if hasattr(signal, "SIGPROF") else 1  # exit status; 1 is faulthandler's


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one template rendering."""

    seconds: float = 1.0  # processor time to compile and render once
    memory: int = 512 << 20  # bytes of the rendering process
    text: int = 4 << 20  # characters of output


class TemplateProcess:
    """Process that renders templates one at a time; thread-safe."""

    def __init__(self, limits: TemplateLimits) -> None:
        """Store the limits; the process starts with the first request."""
        self.limits = limits
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if no process is running."""
        return None if self._worker is None else self._worker.pid

    def ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """Compile or render a template in the process (see template_worker.py).

        Returns the worker's answer, or an error if the process ended. TypeError, ValueError or RecursionError for
        values that are not JSON; ChildProcessError if the process cannot be started.
        """
        data = _encode(request)
        with self._lock:
            worker = self._started_worker()
            try:
                return _ask_worker(worker, data)
            except (EOFError, OSError):
                return {"code": "TemplateBudget", "message": self._limit_message(self._end(worker))}
            except BaseException:  # such as Ctrl-C: a late answer must not reach the next request
                self._end(worker)
                raise

    def stop(self) -> None:
        """End the process if it is running; the next request starts a new one."""
        with self._lock:
            if self._worker is not None:
                self._end(self._worker)

    def forget(self) -> None:
        """Drop the parent's process in a forked copy."""
        self._lock, self._worker = threading.Lock(), None

    def _started_worker(self) -> Worker:
        """Return the process that renders templates; start it if none runs."""
        if self._worker is not None and not self._worker.runs:
            self._end(self._worker)  # it ended between requests
        if self._worker is None:
            command = _command()
            worker = self._worker = Worker(command, output=DEVNULL)
            try:
                _ask_worker(worker, _encode(asdict(self.limits)))
            except BaseException as error:
                status = self._end(worker)
                if isinstance(error, EOFError | OSError):
                    raise ChildProcessError(_start_error(command, status)) from None
                raise
        return self._worker

    def _end(self, worker: Worker) -> int | None:
        self._worker = None
        return worker.end()

    def _limit_message(self, status: int | None) -> str:
        if status == _OUT_OF_TIME:
            return f"takes over {self.limits.seconds:g} s"
        if status == _OUT_OF_MEMORY:
            return f"takes over {self.limits.memory >> 20} MiB of memory"
        return f"ended the rendering process with status {status}"


def _command() -> list[str]:
    """Return the command of an isolated Python (no user settings, no site) with this process's import paths."""
    module = Path(__file__)
    paths = [str(module.parent), *(str(Path(path).absolute()) for path in sys.path), str(module.parents[3])]
    return [sys.executable, "-I", "-S", "-c", _BOOT, *paths]


def _start_error(command: list[str], status: int | None) -> str:
    message = f"chat templates: the rendering process ended with status {status} before it was ready"
    return f"{message}; to see why, run: {' '.join(command)}"


def _encode(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _ask_worker(worker: Worker, data: bytes) -> dict[str, str]:
    worker.channel.send(data)
    return json.loads(worker.channel.receive(_MAX_ANSWER).decode("utf-8", "surrogatepass"))


RESIDENT = TemplateProcess(TemplateLimits())  # renders all templates of this process
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RESIDENT.forget)
