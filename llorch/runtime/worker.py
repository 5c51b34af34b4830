"""One supervised child process: it is started, asked and watched, it has limits, and its end is known.

    run(command, seconds=...)     a program to its end, with limits of time and output
    Worker(command)               a process that stays: it is asked through a channel, or only watched
    Worker(function)              a copy of this process that calls a function (a fork, which only Linux does safely)
    python("module:function")     the command of a new Python that calls a function with the imports of this process

A worker leads a session. `end` kills it with all that it started; so do the garbage collector and the exit of this
process. If a signal kills this process, a copy is killed by the kernel, and a new Python finds its channel closed.
`limit_memory` and `end_with_parent` are for the code in the child. A child may import this module and `channel` alone:
they need the standard library only.
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
_GRACE = 1.0  # seconds for the pipes of a process that ended
_BOOT = (
    "import json, sys; sys.path[:] = sys.argv[2:]; import llorch.runtime.worker as w; w.call(*json.loads(sys.argv[1]))"
)


class Worker:
    """A child process that leads a session.

    Attributes:
        pid: Process id, which is the id of the session.
        output: Unbuffered file of what the child prints, if `PIPE` was asked for.
    """

    output: Any
    _process: "subprocess.Popen[bytes] | _Copy"

    def __init__(
        self, start: Sequence[str] | Callable[[Channel], object], *, talks: bool = True,
        output: int | BinaryIO | None = None, env: Mapping[str, str] | None = None, cwd: str | Path | None = None,
        dies_by: signal.Signals | None = None,
    ) -> None:  # fmt: skip
        """Start it.

        Args:
            start: A command, or a function for a copy of this process; the function gets the channel.
            talks: The channel is stdin and stdout of a command. Without a channel stdin is empty.
            output: File for stderr, and for stdout if it is no channel: `PIPE`, `DEVNULL`, or None for stderr of
                this process.
            env: Variables of a command.
            cwd: Working directory of a command.
            dies_by: Signal that a copy gets when the thread that started it ends; by default SIGKILL.
        """
        if callable(start):
            self._process, self._channel, self.output = _copied(start, output, dies_by)
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
        """The channel to a child that talks."""
        assert self._channel is not None
        return self._channel

    @property
    def runs(self) -> bool:
        """True if the child runs and is not a child of a process that this one is a copy of."""
        return self._end.alive and self.status is None

    @property
    def status(self) -> int | None:
        """Exit status of the child, or minus the number of the signal that ended it; None while it runs."""
        return self.wait(0)

    @property
    def held_bytes(self) -> int:
        """Memory that the processes of the session hold; 0 if the system does not tell."""
        held = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, IndexError, ValueError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid:
                    held += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return held

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the child, and return `status`."""
        known = self._process.returncode
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if known is None and self._process.returncode is not None:
            _kill_session(self.pid)  # later the number may belong to another session
        return self._process.returncode

    def terminate(self) -> None:
        """Ask the child to end."""
        self._process.terminate()

    def end(self) -> int | None:
        """End the child and all that it started; return its status, which stays what it was if it had ended."""
        self._end()
        return self._process.returncode

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()


class _Copy:
    """A forked process with the methods of `subprocess.Popen` that a worker uses."""

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


def _copied(
    work: Callable[[Channel], object], output: int | BinaryIO | None, dies_by: signal.Signals | None
) -> tuple[_Copy, Channel, BinaryIO | None]:
    """Start a copy of this process; return it with its channel and the pipe of its output."""
    asked, answered, printed = os.pipe(), os.pipe(), os.pipe() if output == PIPE else None
    parent = os.getpid()

    def begin() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
        with suppress(AttributeError, TypeError, OSError):  # Linux has it
            ctypes.CDLL(None).prctl(1, dies_by or signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        for descriptor in (asked[1], answered[0], *([printed[0]] if printed else [])):
            os.close(descriptor)
        if printed:
            nothing = os.open(os.devnull, os.O_RDONLY)
            for old, new in ((nothing, 0), (printed[1], 1), (printed[1], 2)):
                os.dup2(old, new)
        work(Channel(open(asked[0], "rb", 0), open(answered[1], "wb", 0)))

    try:
        process = _Copy(begin)
    finally:
        for descriptor in (asked[0], answered[1], *([printed[1]] if printed else [])):
            os.close(descriptor)
    pipe: Any = open(printed[0], "rb", 0) if printed else None
    return process, Channel(open(answered[0], "rb", 0), open(asked[1], "wb", 0)), pipe


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


def _leave_to_parent() -> None:
    """Let go of the workers in a copy of the process that started them, so that their channels close with it."""
    for worker in list(_RUNNING):
        if worker._end.detach():
            worker._process.returncode = 0  # no child of this process: not to be killed or waited for
            for file in worker._files:
                file.close()
    _RUNNING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True)
class Ended:
    """The end of a program.

    Attributes:
        status: Exit status, or minus the number of the signal that ended it.
        output: Bytes of stdout.
        errors: Bytes of stderr.
        limit: The limit that made llorch end the program: `time`, `output`, or `exit` if it closed its output in time
            and did not end; empty if it ended by itself.
    """

    status: int
    output: bytes
    errors: bytes
    limit: Literal["", "time", "output", "exit"]

    @property
    def text(self) -> str:
        """Output as text."""
        return self.output.decode("utf-8", "replace")

    @property
    def last_words(self) -> str:
        """Last line of stderr."""
        return last_line(self.errors)


class _PipeReader(threading.Thread):
    """Reads a pipe to its end, or until there is more than allowed; for good, where a grandchild keeps it open."""

    def __init__(self, pipe: Any, most: int) -> None:
        super().__init__(daemon=True)
        self.data, self.pipe, self._most = bytearray(), pipe, most
        self.start()

    def run(self) -> None:
        with self.pipe, suppress(OSError):
            while len(self.data) <= self._most and (part := self.pipe.read(1 << 16)):
                self.data += part


def run(
    command: Sequence[str], *, seconds: float | None, stdin: bytes | int = DEVNULL, output: int = PIPE,
    errors: int | None = PIPE, most: int = MOST, env: Mapping[str, str] | None = None, cwd: str | Path | None = None,
    session: bool = False,
) -> Ended:  # fmt: skip
    """Run a program to its end, and end it when it reaches a limit. OSError if it cannot be started.

    The limits are `seconds`, and `most` bytes of stdout and of stderr. `stdin` is its input, or `PIPE` for a program
    that ends when its stdin does (see `end_with_parent`). stdout is read (`PIPE`) or dropped (`DEVNULL`), stderr may be
    passed on, too (None). With `session` the program leads a session, which ends with it.
    """
    process = _started(command, stdin, stdout=output, stderr=errors, env=env, cwd=cwd, start_new_session=session)
    readers = [_PipeReader(pipe, most) for pipe in (process.stdout, process.stderr) if pipe]
    try:
        limit = _limit_of(process, readers, most, seconds)
    finally:
        if session:
            _kill_session(process.pid)
        process.kill()
        status = process.wait()
        if process.stdin:
            process.stdin.close()
    for reader in readers:
        reader.join(_GRACE)
    read = {reader.pipe: bytes(reader.data) for reader in readers}
    return Ended(status, read.get(process.stdout, b""), read.get(process.stderr, b""), limit)


def _started(command: Sequence[str], stdin: bytes | int, **options: Any) -> subprocess.Popen:
    """Start a program that reads some bytes, a pipe or nothing."""
    with tempfile.TemporaryFile() as file:
        if not isinstance(stdin, int):
            file.write(stdin)
            file.seek(0)
        return subprocess.Popen(command, bufsize=0, stdin=stdin if isinstance(stdin, int) else file, **options)


def _limit_of(
    process: subprocess.Popen, readers: Sequence[_PipeReader], most: int, seconds: float | None
) -> Literal["", "time", "output", "exit"]:
    """Wait for the end of a program, and name the limit that it reaches."""
    end = None if seconds is None else time.monotonic() + seconds

    def left(least: float = 0.0) -> float | None:
        return None if end is None else max(end - time.monotonic(), least)

    for reader in readers:
        reader.join(left())
        if len(reader.data) > most:
            return "output"
    if any(reader.is_alive() for reader in readers):
        return "time"
    try:
        process.wait(left(_GRACE))
        return ""
    except subprocess.TimeoutExpired:
        return "exit"


def last_line(data: bytes) -> str:
    """Return the last line that is not empty, with single spaces."""
    lines = (" ".join(line.split()) for line in reversed(data.decode("utf-8", "replace").splitlines()))
    return next((line for line in lines if line), "")


def tail(file: Path) -> bytes:
    """Read the end of a file."""
    with file.open("rb") as said:
        said.seek(max(0, file.stat().st_size - 8192))
        return said.read()


def signal_name(status: int) -> str:
    """Name the signal that ended a process; empty if it ended by itself."""
    return signal.Signals(-status).name if status < 0 else ""


def python(target: str, *arguments: object) -> list[str]:
    """Make the command of a new Python that calls `module:function` with values that JSON can hold."""
    paths = (str(Path(path).absolute()) for path in sys.path)
    return [sys.executable, "-c", _BOOT, json.dumps([target, *arguments]), *paths]


def call(target: str, *arguments: object) -> object:
    """Call `module:function`, in the child."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(*arguments)


def end_with_parent() -> None:
    """End this process when its stdin ends, while it does something else."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1 << 10):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def limit_memory(n_bytes: int, *, kind: Literal["RLIMIT_AS", "RLIMIT_DATA"]) -> None:
    """Limit what this process may allocate, where the system can; what it dumps when it crashes is nothing.

    `RLIMIT_AS` counts the libraries and files that are mapped, too.
    """
    with suppress(ImportError, ValueError, OSError):  # not on every system, and the limit may be lower already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(getattr(resource, kind), (n_bytes, n_bytes))
