"""Chat templates at a bounded cost: they are rendered in a process that is ended when one takes too much.

The process starts with the first template, in about 60 ms, and stays: a rendering then costs about 0.1 ms more than in
this process. It ends with this process, and is started again after it was ended. Memory is limited where the system
has RLIMIT_AS (Linux does; Windows and macOS do not); time and the length of the text are limited everywhere. Time is
processor time, so a busy machine stops no template. On Windows, which has no such timer, time is wall-clock time.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

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
        """Start nothing yet."""
        self.limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """Have a template compiled or rendered (see template_worker.py).

        The answer is the worker's, or fits the way in which the process ended. What JSON cannot say is a TypeError,
        ValueError or RecursionError; ChildProcessError where the process cannot be started.
        """
        data = _encoded(request)
        with self._lock:
            process = self._running()
            try:
                return _asked(process, data)
            except (EOFError, OSError):
                return {"code": "TemplateBudget", "message": self._breach(self._ended(process))}
            except BaseException:  # such as Ctrl-C: an answer may come that nobody waits for
                self._ended(process)
                raise

    def stop(self) -> None:
        """End the process, if there is one; the next request starts another."""
        with self._lock:
            if self._process is not None:
                self._ended(self._process)

    def forget(self) -> None:
        """Leave the process to the one that this process was forked from."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # no child of this process: not to be killed or waited for
            self._ended(self._process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process)  # while nothing was asked
        if self._process is None:
            process = self._process = _started()
            try:
                _asked(process, _encoded(asdict(self.limits)))
            except BaseException as error:
                status = self._ended(process)
                if isinstance(error, EOFError | OSError):
                    raise ChildProcessError(_no_start(process.args, status)) from None
                raise
        return self._process

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """End the process if it has not, and return its exit status."""
        self._process = None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return process.wait()

    def _breach(self, status: int) -> str:
        if status == _OUT_OF_TIME:
            return f"takes over {self.limits.seconds:g} s"
        if status == _OUT_OF_MEMORY:
            return f"takes over {self.limits.memory >> 20} MiB of memory"
        return f"ended the rendering process with status {status}"


def _started() -> subprocess.Popen[bytes]:
    """Python on its own (no settings of the user, no site), and where this process finds packages."""
    places = [str(Path(__file__).parent), *(str(Path(place).absolute()) for place in sys.path)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, *places],
        bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _no_start(arguments: object, status: int) -> str:
    command = " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments)
    return (
        f"chat templates: the rendering process ended with status {status} before it was ready;"
        f" to see why, run: {command}"
    )


def _encoded(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _asked(process: subprocess.Popen[bytes], data: bytes) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(process.stdin.fileno(), rest) :]
    size = int.from_bytes(_read(process.stdout.fileno(), 4), "big")
    if size > _MAX_ANSWER:
        raise EOFError("the rendered text is too long")
    return json.loads(_read(process.stdout.fileno(), size).decode("utf-8", "surrogatepass"))


def _read(pipe: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            raise EOFError("the process ended")
        data += part
    return bytes(data)


RESIDENT = TemplateProcess(TemplateLimits())
atexit.register(RESIDENT.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RESIDENT.forget)
