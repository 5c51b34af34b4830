"""Reference engines in child processes: if one crashes, hangs or uses all memory, llorch reports one line and goes on.

An engine changes the state of its own process only: environment variables of ggml, thread numbers of torch and BLAS,
torch's default dtype, log levels of transformers, llama.cpp's log function, leaked memory. llorch's process imports no
engine. A child process serves several models in turn, because importing transformers takes seconds.
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

from llorch.engines.child import message, rebuild_error, receive
from llorch.runtime.errors import EngineDied, UserError
from llorch.runtime.worker import Worker, last_line, python, signal_name, tail

# Switches off what may change float32 results; ggml reads them once, when its CPU backend starts.
GGML_VARIABLES = {"GGML_CPU_DISABLE_FUSION": "1", "GGML_CPU_TILED_MM": "0"}
_VARIABLES = {"llamacpp": GGML_VARIABLES}
_IMPORTS = {"llamacpp": "llorch.engines.llamacpp", "transformers": "llorch.engines.transformers"}
# Time limit of a silent engine: START, plus PASSES reads of the whole model at SPEED, the speed of a slow disk.
START, PASSES, SPEED = 180.0, 32, 50e6  # seconds, number of reads, bytes per second
_MAX_CHARACTERS = 300  # of the last output line, in messages


Progress = Callable[[str], None]


def _ignore_progress(text: str) -> None:
    """Ignore a line of progress."""


class EngineProcess:
    """Child process of one engine."""

    def __init__(self, engine: str) -> None:
        """Start the process; it imports `llamacpp` or `transformers` before the first request."""
        self.engine, self._lock, self._death = engine, threading.Lock(), ""
        self.progress: Progress = _ignore_progress  # called with every progress message
        if not hasattr(socket, "AF_UNIX"):  # Windows
            reason = "llorch cannot run engines on a system without Unix sockets"
            raise EngineDied(f"{engine}: {reason}; use --against golden with a built-in model")
        folder = Path(tempfile.mkdtemp(prefix="llorch-"))  # removed with all files that the engine leaves
        variables = {"GGML_NO_BACKTRACE": "1", "TMPDIR": str(folder)}  # a backtrace would hide the last error line
        with (folder / "stderr").open("wb") as stderr:
            command = python("llorch.engines.child:main", _IMPORTS.get(engine, ""))
            self._worker = Worker(command, output=stderr, env=os.environ | variables | _VARIABLES.get(engine, {}))
        self._end = finalize(self, _end_process, os.getpid(), self._worker, folder)

    @property
    def pid(self) -> int:
        """Process id of the engine's process."""
        return self._worker.pid

    @property
    def runs(self) -> bool:
        """True if the process has not ended."""
        return self._worker.runs

    def ask(self, call: str, request: Sequence[object], seconds: float) -> Any:
        """Send a request and return its result; re-raise the engine's exception with its traceback as a note.

        For `request`, see child.py. Raise EngineDied with `call` if the process ended or was silent for `seconds`.
        """
        encoded = message(request)
        with self._lock:
            if self._death:
                raise EngineDied(self._death)
            try:
                channel = self._worker.channel
                channel.seconds = seconds
                channel.send(*encoded)
                while (reply := receive(channel))[0] == "said":
                    self.progress(reply[1])
            except (EOFError, OSError) as error:
                is_timeout = isinstance(error, TimeoutError)
                call = f"no answer to {call} for {seconds:.0f} s" if is_timeout else f"{self._describe_end()} in {call}"
                self._death = f"{self.engine}: {call}; {self._end()}"
                raise EngineDied(self._death) from None
            except BaseException:  # such as Ctrl-C: the unread answer would be taken for the next one
                self._death = f"{self.engine}: llorch ended the engine's process because {call} was interrupted"
                self._end()
                raise
        kind, *values = reply
        if kind == "value":
            return values[0]
        *description, trace = values
        raise self._error(description, trace)

    def _error(self, description: list, trace: str) -> Exception:
        """Rebuild the engine's exception, with its traceback as a note."""
        error = rebuild_error(*description)
        if isinstance(error, ValueError) and not isinstance(error, UserError):
            error = UserError(str(error))  # the engine rejects the model
        error.add_note(f"in the process of {self.engine}:\n{trace}")
        return error

    def end(self) -> None:
        """End the process, even during a call."""
        self._death = f"{self.engine}: llorch ended the engine's process"
        self._end()

    def _describe_end(self) -> str:
        """Describe how the process ended, after at most 5 s of waiting for its exit status."""
        status = self._worker.wait(5)
        if status is None:
            return "the engine's process does not answer"
        if status >= 0:
            return f"the engine's process ended with status {status}"
        memory = ", probably because memory ran out" if status == -signal.SIGKILL else ""
        return f"the engine's process was ended by {signal_name(status)}{memory}"


def _end_process(owner: int, worker: Worker, folder: Path) -> str:
    """End a process, remove its files and return its last output; do nothing in a fork of the `owner` process (id)."""
    if owner != os.getpid():
        return ""
    worker.end()
    last_output = last_line(tail(folder / "stderr"))[:_MAX_CHARACTERS]
    shutil.rmtree(folder, ignore_errors=True)
    return f"its last output: {last_output}" if last_output else "it printed nothing"


class EngineInChild:
    """Proxy of an engine with a model in a child process; it has every public method of the engine."""

    def __init__(
        self,
        engine: str,
        path: str | Path,
        target: str,
        *args: object,
        progress: Progress | None = None,
        **kwargs: object,
    ) -> None:
        """Load a model with the function `target`, `module:function`; the size of the model sets the time limits."""
        self._engine, self._path = engine, Path(path)
        self._process: EngineProcess | None = _take_idle(engine)
        self._process.progress = progress or _ignore_progress
        try:
            attributes = self._process.ask(
                "loading", ["open", str(Path.cwd()), target, args, kwargs], _time_limit(self._path)
            )
        except BaseException:
            _return_idle(self._process)
            raise
        for method in attributes.pop("methods"):
            setattr(self, method, partial(self._call, method))
        vars(self).update(attributes)

    def __enter__(self) -> "EngineInChild":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the engine's process."""
        return self._require_process().pid

    def close(self) -> None:
        """Free the model; keep the process for the next model."""
        process, self._process = self._process, None
        if process is not None and process.runs:
            process.ask("closing", ["close"], START)
            _return_idle(process)

    def _call(self, method: str, *args: object, **kwargs: object) -> Any:
        calls: Any = args[0] if method == "call_batch" else [(method, args, kwargs)]
        seconds = sum(_time_limit(self._path, *arguments, *keywords.values()) for _, arguments, keywords in calls)
        return self._require_process().ask(method, ["call", method, args, kwargs], seconds)

    def _require_process(self) -> EngineProcess:
        """Return the child process; raise ValueError after `close`."""
        if self._process is None:
            raise ValueError(f"{self._engine}: the engine is closed")
        return self._process


def in_child(engine: str, path: str | Path, target: str, *args: object) -> Any:
    """Call `target`, `module:function`, in the process of an engine; the size of the model sets the time limit."""
    process = _take_idle(engine)
    try:
        function_name = target.rpartition(":")[2]
        return process.ask(function_name, ["run", str(Path.cwd()), target, args, {}], _time_limit(Path(path), *args))
    finally:
        _return_idle(process)


def start(engines: Sequence[str]) -> None:
    """Start the processes of engines in the background, so that they import the engines early."""
    for engine in engines:
        _return_idle(_take_idle(engine))


def _take_idle(engine: str) -> EngineProcess:
    """Take the idle process of an engine, or start a new one."""
    idle = _IDLE.pop(engine, None)
    return idle if idle is not None and idle.runs else EngineProcess(engine)


def _return_idle(process: EngineProcess) -> None:
    """Keep a process for the next model, or end it if another process of the engine is already idle."""
    process.progress = _ignore_progress
    if process.runs and _IDLE.setdefault(process.engine, process) is not process:
        process.end()


def _time_limit(path: Path, *args: object) -> float:
    """Compute the time limit of a call in seconds, with one more read of the model for each token of the arguments."""
    files = path.iterdir() if path.is_dir() else [path] if path.exists() else []
    n_bytes = sum(file.stat().st_size for file in files if file.is_file())
    n_tokens = max((len(argument) for argument in args if isinstance(argument, Sequence | Mapping)), default=0)
    return START + (PASSES + n_tokens) * n_bytes / SPEED


_IDLE: dict[str, EngineProcess] = {}  # idle process by engine
