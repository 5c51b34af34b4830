"""Engines in processes of their own: one that crashes, hangs or takes all memory is a line, and the work goes on.

What an engine does to its process stays there: variables that ggml reads, torch's and BLAS's number of threads and
default dtype, the log levels of transformers, llama.cpp's log function, memory that was never given back. This process
imports no engine. A process serves one model after the other, because importing transformers takes seconds.
"""

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize

from llorch.engines.child import message, raised, receive
from llorch.runtime.errors import EngineDied, UserError
from llorch.runtime.worker import Worker, last_line, python, signal_name, tail

GGML_VARIABLES = {"GGML_CPU_DISABLE_FUSION": "1", "GGML_CPU_TILED_MM": "0"}  # read once, when its CPU backend starts
_VARIABLES = {"llamacpp": GGML_VARIABLES}
_IMPORTS = {"llamacpp": "llorch.engines.llamacpp", "transformers": "llorch.engines.transformers"}
# How long an engine may be silent: its start, and as often as a call may go through the whole model, at a speed that a
# slow disk has.
START, PASSES, SPEED = 180.0, 32, 50e6  # seconds, times, bytes per second
_WORDS = 300  # characters


Progress = Callable[[str], None]


def _silent(text: str) -> None:
    """Ignore a line of progress."""


class EngineProcess:
    """A process for one engine."""

    def __init__(self, engine: str) -> None:
        """Start it; `llamacpp` and `transformers` are imported while nothing is asked yet."""
        self.engine, self._lock, self._death = engine, threading.Lock(), ""
        self.progress: Progress = _silent  # told how far a call is
        if not hasattr(socket, "AF_UNIX"):  # Windows
            what = "llorch cannot run engines on a system without Unix sockets"
            raise EngineDied(f"{engine}: {what}; use --against golden with a built-in model")
        folder = Path(tempfile.mkdtemp(prefix="llorch-"))  # whatever the engine leaves there goes with it
        variables = {"GGML_NO_BACKTRACE": "1", "TMPDIR": str(folder)}  # C frames are nobody's last words
        with (folder / "stderr").open("wb") as said:
            command = python("llorch.engines.child:main", _IMPORTS.get(engine, ""))
            self._worker = Worker(command, output=said, env=os.environ | variables | _VARIABLES.get(engine, {}))
        self._end = finalize(self, _ended, os.getpid(), self._worker, folder)

    @property
    def pid(self) -> int:
        """Process id of the engine's process."""
        return self._worker.pid

    @property
    def runs(self) -> bool:
        """True if the process can answer calls."""
        return self._worker.runs

    def ask(self, what: str, request: Sequence[object], seconds: float) -> Any:
        """Have something done; what the engine raises is raised here, with the place in its process as a note.

        `request`: see child.py. EngineDied, with `what`, when the process ended or was silent for too many seconds.
        """
        parts = message(request)
        with self._lock:
            if self._death:
                raise EngineDied(self._death)
            try:
                channel = self._worker.channel
                channel.seconds = seconds
                channel.send(*parts)
                while (received := receive(channel))[0] == "said":
                    self.progress(received[1])
            except (EOFError, OSError) as error:
                hangs = isinstance(error, TimeoutError)
                what = f"no answer to {what} for {seconds:.0f} s" if hangs else f"{self._way_to_end()} in {what}"
                self._death = f"{self.engine}: {what}; {self._end()}"
                raise EngineDied(self._death) from None
            except BaseException:  # such as Ctrl-C: an answer may come that nobody waits for
                self._death = f"{self.engine}: llorch ended the engine's process because {what} was interrupted"
                self._end()
                raise
        kind, *answer = received
        if kind == "value":
            return answer[0]
        *description, trace = answer
        raise self._error(description, trace)

    def _error(self, description: list, trace: str) -> Exception:
        """Make the exception that the engine raised, with the place in its process as a note."""
        error = raised(*description)
        if isinstance(error, ValueError) and not isinstance(error, UserError):
            error = UserError(str(error))  # the engine refuses the model
        error.add_note(f"in the process of {self.engine}:\n{trace}")
        return error

    def end(self) -> None:
        """End the process, whatever it does."""
        self._death = f"{self.engine}: llorch ended the engine's process"
        self._end()

    def _way_to_end(self) -> str:
        status = self._worker.wait(5)
        if status is None:
            return "the engine's process does not answer"
        if status >= 0:
            return f"the engine's process ended with status {status}"
        memory = ", probably because memory ran out" if status == -signal.SIGKILL else ""
        return f"the engine's process was ended by {signal_name(status)}{memory}"


def _ended(owner: int, worker: Worker, folder: Path) -> str:
    """End a process and remove its files; says what its last words were. A copy of its owner leaves it alone."""
    if owner != os.getpid():
        return ""
    worker.end()
    words = last_line(tail(folder / "stderr"))[:_WORDS]
    shutil.rmtree(folder, ignore_errors=True)
    return f"its last output: {words}" if words else "it printed nothing"


class EngineInChild:
    """An engine with a model, in a process of its own: it has every public method of that engine."""

    def __init__(
        self,
        engine: str,
        path: str | Path,
        target: str,
        *args: object,
        progress: Progress | None = None,
        **kwargs: object,
    ) -> None:
        """Load a model by `target`, `module:function`; its size sets the time limits. `progress` gets its messages."""
        self._engine, self._path = engine, Path(path)
        self._process: EngineProcess | None = _take_idle(engine)
        self._process.progress = progress or _silent
        try:
            shown = self._process.ask("loading", ["open", str(Path.cwd()), target, args, kwargs], _patience(self._path))
        except BaseException:
            _give_back(self._process)
            raise
        for method in shown.pop("methods"):
            setattr(self, method, partial(self._call, method))
        vars(self).update(shown)

    def __enter__(self) -> "EngineInChild":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the engine's process."""
        return self._asked().pid

    def close(self) -> None:
        """Free the model; its process waits for the next."""
        process, self._process = self._process, None
        if process is not None and process.runs:
            process.ask("closing", ["close"], START)
            _give_back(process)

    def _call(self, method: str, *args: object, **kwargs: object) -> Any:
        calls: Any = args[0] if method == "call_batch" else [(method, args, kwargs)]
        seconds = sum(_patience(self._path, *given, *named.values()) for _, given, named in calls)
        return self._asked().ask(method, ["call", method, args, kwargs], seconds)

    def _asked(self) -> EngineProcess:
        """Return the child process; ValueError after `close`."""
        if self._process is None:
            raise ValueError(f"{self._engine}: the engine is closed")
        return self._process


def in_child(engine: str, path: str | Path, target: str, *args: object) -> Any:
    """Call `target`, `module:function`, in the process of an engine; the size of the model sets the limits of time."""
    process = _take_idle(engine)
    try:
        what = target.rpartition(":")[2]
        return process.ask(what, ["run", str(Path.cwd()), target, args, {}], _patience(Path(path), *args))
    finally:
        _give_back(process)


def start(engines: Sequence[str]) -> None:
    """Let processes of engines import them meanwhile; each is used when the engine is."""
    for engine in engines:
        _give_back(_take_idle(engine))


def _take_idle(engine: str) -> EngineProcess:
    """Take the idle process of an engine, or start a new one."""
    idle = _IDLE.pop(engine, None)
    return idle if idle is not None and idle.runs else EngineProcess(engine)


def _give_back(process: EngineProcess) -> None:
    """Let a process wait for the next model, where no other does."""
    process.progress = _silent
    if process.runs and _IDLE.setdefault(process.engine, process) is not process:
        process.end()


def _patience(path: Path, *args: object) -> float:
    """Compute the time limit of a call in seconds: the model runs once for each token, with a reserve."""
    files = path.iterdir() if path.is_dir() else [path] if path.exists() else []
    n_bytes = sum(file.stat().st_size for file in files if file.is_file())
    n_tokens = max((len(value) for value in args if isinstance(value, Sequence | Mapping)), default=0)
    return START + (PASSES + n_tokens) * n_bytes / SPEED


_IDLE: dict[str, EngineProcess] = {}  # by engine
