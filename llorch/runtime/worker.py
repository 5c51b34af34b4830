"""One supervised child process with limits of time, output and memory.

    run(command, seconds=...)     run a program to its end, with limits of time and output
    Worker(command)               a long-running process, with a channel for requests or without
    Worker(function)              a forked copy of this process that calls a function (only Linux forks safely)
    python("module:function")     the command of a new Python that calls a function with the imports of this process

A worker leads a POSIX session, which contains its children. `end` kills the whole session; so do the garbage collector
and the exit of this process. If a signal kills this process, the kernel kills a forked copy, and a new Python finds its
channel closed. `call`, `limit_memory` and `end_with_parent` run in the child. For a child that needs nothing else, this
module and `channel` import the standard library only.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal
from weakref import WeakSet, finalize

from llorch.runtime.channel import Channel

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
MOST = 256 << 20  # bytes of output
_GRACE = 1.0  # seconds to read the pipes of an ended process
_BOOT = (
    "import json, sys; sys.path[:] = sys.argv[2:]; import llorch.runtime.worker as w; w.call(*json.loads(sys.argv[1]))"
)


class Worker:
    """Child process that leads a session.

    Attributes:
        pid: Process id, which is the id of the session.
        output: Unbuffered file with the child's output, if `output` is `PIPE`.
    """

    output: Any
    _process: "subprocess.Popen[bytes] | _Copy"

    def __init__(
        self, start: Sequence[str] | Callable[[Channel], object], *, talks: bool = True,
        output: int | BinaryIO | None = None, env: Mapping[str, str] | None = None, cwd: str | Path | None = None,
        dies_by: signal.Signals | None = None,
    ) -> None:  # fmt: skip
        """Start the child.

        Args:
            start: A command, or a function for a copy of this process; the function gets the channel.
            talks: True for a channel, which is stdin and stdout of a command. Without a channel stdin is empty.
            output: File for stderr, and for stdout without a channel: `PIPE`, `DEVNULL`, or None to inherit.
            env: Environment variables of a command.
            cwd: Working directory of a command.
            dies_by: Signal to a forked copy when the thread that started it ends; by default SIGKILL.
        """
        if callable(start):
            self._process, self._channel, self.output = _fork(start, output, dies_by)
        else:
            self._process = subprocess.Popen(
                start, bufsize=0, stdin=PIPE if talks else DEVNULL, stdout=PIPE if talks else output,
                stderr=output if talks or output != PIPE else subprocess.STDOUT, env=env, cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
            self.output = self._process.stderr if talks else self._process.stdout
            self._channel = Channel(self._process.stdout, self._process.stdin) if talks else None
        self.pid = self._process.pid
        self._files = [file for file in (self._channel, self.output) if file is not None]
        self._end = finalize(self, _end, self._process, self._files)
        _RUNNING.add(self)

    @property
    def channel(self) -> Channel:
        """Channel to a child with `talks`."""
        assert self._channel is not None
        return self._channel

    @property
    def runs(self) -> bool:
        """True if the child is running and this process started it, not the process that this one was forked from."""
        return self._end.alive and self.status is None

    @property
    def status(self) -> int | None:
        """Exit status of the child, or minus the number of the signal that ended it; None while it runs."""
        return self.wait(0)

    @property
    def held_bytes(self) -> int:
        """Resident memory of the session's processes in bytes; 0 if the system has no /proc."""
        n_bytes = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, IndexError, ValueError):
                fields = stat.read_text().rpartition(")")[2].split()  # from the third on: 3 session, 21 resident pages
                if int(fields[3]) == self.pid:
                    n_bytes += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return n_bytes

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the child, kill its session when it ends, and return its exit status, else None."""
        previous_status = self._process.returncode
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if previous_status is None and self._process.returncode is not None:
            _kill_session(self.pid)  # at once: later the session's id may belong to another session
        return self._process.returncode

    def terminate(self) -> None:
        """Ask the child to end."""
        self._process.terminate()

    def end(self) -> int | None:
        """Kill the child's session; return the exit status of the child."""
        self._end()
        return self._process.returncode

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()


class _Copy:
    """Forked process with the methods of `subprocess.Popen` that a worker uses."""

    def __init__(self, work: Callable[[], object]) -> None:
        from multiprocessing import get_context

        self._process = get_context("fork").Process(target=work, daemon=True)
        with warnings.catch_warnings():  # about threads: they wait for files and keys, or belong to BLAS
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        assert self._process.pid is not None
        self.pid, self.terminate, self.kill = self._process.pid, self._process.terminate, self._process.kill
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a copy of this process", timeout or 0)
        return status


def _fork(
    work: Callable[[Channel], object], output: int | BinaryIO | None, dies_by: signal.Signals | None
) -> tuple[_Copy, Channel, BinaryIO | None]:
    """Fork this process; return the copy with its channel and the pipe of its output."""
    requests, answers, output_pipe = os.pipe(), os.pipe(), os.pipe() if output == PIPE else None
    parent = os.getpid()

    def begin() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        with suppress(AttributeError, TypeError, OSError):  # only Linux has prctl
            ctypes.CDLL(None).prctl(1, dies_by or signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before prctl
            os._exit(1)
        for descriptor in (requests[1], answers[0], *([output_pipe[0]] if output_pipe else [])):
            os.close(descriptor)
        if output_pipe:
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (output_pipe[1], 1), (output_pipe[1], 2)):
                os.dup2(source, target)
        work(Channel(open(requests[0], "rb", 0), open(answers[1], "wb", 0)))

    try:
        process = _Copy(begin)
    finally:
        for descriptor in (requests[0], answers[1], *([output_pipe[1]] if output_pipe else [])):
            os.close(descriptor)
    pipe: Any = open(output_pipe[0], "rb", 0) if output_pipe else None
    return process, Channel(open(answers[0], "rb", 0), open(requests[1], "wb", 0)), pipe


def _end(process: "subprocess.Popen[bytes] | _Copy", files: Sequence[Any]) -> None:
    if process.returncode is None:
        _kill_session(process.pid)
        process.kill()
        process.wait()
    for file in files:
        with suppress(OSError):
            file.close()


def _kill_session(pid: int) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


_RUNNING: WeakSet[Worker] = WeakSet()


def _drop_parent_workers() -> None:
    """Drop the parent's workers in a forked process, so that it does not keep their channels open."""
    for worker in list(_RUNNING):
        if worker._end.detach():
            worker._process.returncode = 0  # not a child of this process: must not be killed or waited for
            for file in worker._files:
                file.close()
    _RUNNING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_parent_workers)


@dataclass(frozen=True)
class ProcessResult:
    """Exit status and output of a program that ended.

    Attributes:
        status: Exit status, or minus the number of the signal that ended it.
        output: Bytes of stdout.
        errors: Bytes of stderr.
        limit: Limit at which llorch killed the program: `time`, `output`, or `exit` if it closed its output but did
            not exit; empty if it ended by itself.
    """

    status: int
    output: bytes
    errors: bytes
    limit: Literal["", "time", "output", "exit"]

    @property
    def text(self) -> str:
        """Output, decoded."""
        return self.output.decode("utf-8", "replace")

    @property
    def error_line(self) -> str:
        """Last line of stderr."""
        return last_line(self.errors)


class _PipeReader(threading.Thread):
    """Thread that reads a pipe to its end or limit; it never ends if a grandchild keeps the pipe open."""

    def __init__(self, pipe: Any, max_bytes: int) -> None:
        super().__init__(daemon=True)
        self.data, self.pipe, self._max_bytes = bytearray(), pipe, max_bytes
        self.start()

    def run(self) -> None:
        with self.pipe, suppress(OSError):
            while len(self.data) <= self._max_bytes and (chunk := self.pipe.read(1 << 16)):
                self.data += chunk


def run(
    command: Sequence[str], *, seconds: float | None, stdin: bytes | int = DEVNULL, output: int = PIPE,
    errors: int | None = PIPE, most: int = MOST, env: Mapping[str, str] | None = None, cwd: str | Path | None = None,
    session: bool = False,
) -> ProcessResult:  # fmt: skip
    """Run a program to its end, or kill it at a limit. OSError if it cannot be started.

    The limits are `seconds`, and `most` bytes of stdout and of stderr. `stdin` is the input, or `PIPE` for a program
    that ends when its stdin does (see `end_with_parent`). stdout is read (`PIPE`) or dropped (`DEVNULL`); stderr can
    also be inherited (None). With `session` the program leads a session, which is killed at its end.
    """
    process = _start(command, stdin, stdout=output, stderr=errors, env=env, cwd=cwd, start_new_session=session)
    readers = [_PipeReader(pipe, most) for pipe in (process.stdout, process.stderr) if pipe]
    try:
        limit = _wait_for_limit(process, readers, most, seconds)
    finally:
        if session:
            _kill_session(process.pid)
        process.kill()
        status = process.wait()
        if process.stdin:
            process.stdin.close()
    for reader in readers:
        reader.join(_GRACE)
    outputs = {reader.pipe: bytes(reader.data) for reader in readers}
    return ProcessResult(status, outputs.get(process.stdout, b""), outputs.get(process.stderr, b""), limit)


def _start(command: Sequence[str], stdin: bytes | int, **options: Any) -> subprocess.Popen:
    """Start a program with bytes, a pipe or nothing as stdin."""
    with tempfile.TemporaryFile() as file:
        if not isinstance(stdin, int):
            file.write(stdin)
            file.seek(0)
        return subprocess.Popen(command, bufsize=0, stdin=stdin if isinstance(stdin, int) else file, **options)


def _wait_for_limit(
    process: subprocess.Popen, readers: Sequence[_PipeReader], max_bytes: int, seconds: float | None
) -> Literal["", "time", "output", "exit"]:
    """Wait for the end of a program, and return the limit that it reached."""
    deadline = None if seconds is None else time.monotonic() + seconds

    def seconds_left(least: float = 0.0) -> float | None:
        return None if deadline is None else max(deadline - time.monotonic(), least)

    for reader in readers:
        reader.join(seconds_left())
        if len(reader.data) > max_bytes:
            return "output"
    if any(reader.is_alive() for reader in readers):
        return "time"
    try:
        process.wait(seconds_left(_GRACE))
        return ""
    except subprocess.TimeoutExpired:
        return "exit"


def last_line(data: bytes) -> str:
    """Return the last line that is not empty, with whitespace collapsed."""
    lines = (" ".join(line.split()) for line in reversed(data.decode("utf-8", "replace").splitlines()))
    return next((line for line in lines if line), "")


def tail(file: Path) -> bytes:
    """Read the last 8 KiB of a file."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 8192))
        return opened.read()


def signal_name(status: int) -> str:
    """Return the name of the signal that ended a process; empty if none did."""
    return signal.Signals(-status).name if status < 0 else ""


def python(target: str, *arguments: object) -> list[str]:
    """Return the command of a new Python that calls `module:function` with JSON values."""
    import_paths = (str(Path(path).absolute()) for path in sys.path)
    return [sys.executable, "-c", _BOOT, json.dumps([target, *arguments]), *import_paths]


def call(target: str, *arguments: object) -> object:
    """Call `module:function`; a child started by `python` runs this first."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(*arguments)


def end_with_parent() -> None:
    """Start a thread that ends this process, with status 1, when its stdin ends: the parent is gone."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1 << 10):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def limit_memory(n_bytes: int, *, kind: Literal["RLIMIT_AS", "RLIMIT_DATA"]) -> None:
    """Limit the memory of this process if the system can, and disable core dumps.

    `RLIMIT_AS` also counts mapped libraries and files.
    """
    with suppress(ImportError, ValueError, OSError):  # not on every system, and the limit may be lower already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(getattr(resource, kind), (n_bytes, n_bytes))
