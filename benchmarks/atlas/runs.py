"""Runs of an engine in child processes: a run that hangs, crashes or takes all memory ends with an outcome.

A process does one run after the other. If a run ends the process, or is silent for too long, the next process
continues after it. No process reaches the network: the hub is offline, and every proxy is a port without a listener.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import llorch.engines.dumps.writers
from benchmarks.atlas.catalogue import ADAPTERS, AtlasEngine
from llorch.runtime.worker import Worker, last_line, run, signal_name, tail

INSTALL = 900.0  # seconds
_MARK = "llorch-requirements.txt"  # copy of the lock file, written when all packages are installed


class NotInstalled(Exception):
    """An engine cannot be installed here; the message has the reason."""


def is_to_install(engine: AtlasEngine, home: Path) -> bool:
    """Return whether `python_of` would download packages."""
    return not engine.why_not and not engine.is_reference_engine and not _is_complete(engine, _folder(engine, home))


def download_bytes(engine: AtlasEngine) -> int:
    """Read the download size from the first line of the lock file: `# 355000000 bytes to download`."""
    return int(engine.lock.read_text(encoding="utf-8").split(maxsplit=2)[1])


def _folder(engine: AtlasEngine, home: Path) -> Path:
    return home / "environments" / engine.script


def _is_complete(engine: AtlasEngine, folder: Path) -> bool:
    """Return whether the folder holds a complete environment of the current lock file."""
    mark = folder / _MARK
    return mark.exists() and mark.read_text(encoding="utf-8") == engine.lock.read_text(encoding="utf-8")


def python_of(engine: AtlasEngine, home: Path) -> Path:
    """Return the interpreter of an engine's environment below a folder; make the environment if it is missing.

    A reference engine uses the interpreter that runs llorch.

    Raises:
        NotInstalled: Its packages are unavailable, or were not installed in `INSTALL` seconds.
    """
    if engine.why_not:
        raise NotInstalled(engine.why_not)
    if engine.is_reference_engine:
        return Path(sys.executable)
    folder = _folder(engine, home)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if _is_complete(engine, folder):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _install([sys.executable, "-m", "venv", str(folder)], folder)
    _install([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(engine.lock)], folder)
    shutil.copyfile(engine.lock, folder / _MARK)
    return python


def _install(command: list[str], folder: Path) -> None:
    """Run an installing command, `INSTALL` seconds at most; if it fails, delete `folder` and raise NotInstalled."""
    environment = os.environ | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    ended = run(command, seconds=INSTALL, env=environment)
    if ended.limit:
        raise NotInstalled(f"installing its packages took over {INSTALL:.0f} s")
    if ended.status:
        shutil.rmtree(folder, ignore_errors=True)
        text = (ended.errors or ended.output).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line.upper()] or lines or ["no message"]
        raise NotInstalled(f"pip cannot install its packages: {errors[0].strip()[:300]}")


SECONDS, START = 60.0, 60.0  # limit of a run, and additional limit for the start of an engine
PROGRAM = 120.0  # seconds of a report's program
MEMORY = 6 << 30  # bytes of a process and its children
REFUSALS = ("ValueError", "NotImplementedError")  # errors that an engine raises to refuse a model
_LOOK = 0.1  # seconds between checks of a process


@dataclass(frozen=True)
class Request:
    """Request to an adapter; see `engines/harness.py`."""

    model: str
    parts: Sequence[Sequence[int]]
    out: str
    scratch: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEnd:
    """End of a run.

    Attributes:
        outcome: `done`, `refused`, `crashed`, `hung` or `too large`.
        error: Message of the engine.
        version: Version of the engine; empty if it died.
        seconds: Duration of the run, measured by its process if that process reported the end.
    """

    outcome: str
    error: str = ""
    version: str = ""
    seconds: float = 0.0


def run_all(
    command: Sequence[str], requests: Sequence[Request], folder: Path, *, seconds: float = SECONDS,
    start: float = START, memory: int = MEMORY, report: Callable[[RunEnd], None] = lambda end: None,
) -> list[RunEnd]:  # fmt: skip
    """Run an adapter on all requests, even if some runs fail.

    Args:
        command: The interpreter and the script.
        requests: Requests in order; results of an earlier attempt are deleted.
        folder: Folder for the list, and for messages and files of the engine.
        seconds: Time limit of a run.
        start: Additional time for the first run of a process.
        memory: Number of bytes that the processes of a run may hold.
        report: Called with a line about the end of each run.

    Returns:
        The end of each run.
    """
    ends: list[RunEnd] = []
    for request in requests:
        (Path(request.out) / "said.json").unlink(missing_ok=True)
    while len(ends) < len(requests):
        for end in _run_process(command, requests[len(ends) :], folder, seconds, start, memory):
            ends.append(end)
            report(end)
    return ends


def run_program(command: Sequence[str], folder: Path, *, seconds: float = PROGRAM) -> str:
    """Run a program that is no adapter and return its output; empty if it fails or takes too long.

    Args:
        command: The interpreter and its arguments.
        folder: Working directory, made anew.
        seconds: Time limit.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = run(command, seconds=seconds, env=_variables(folder) | {"PYTHONPATH": ""}, cwd=folder, session=True)
    return "" if ended.status or ended.limit else ended.text


def _run_process(
    command: Sequence[str], requests: Sequence[Request], folder: Path, seconds: float, start: float, memory: int
) -> Iterator[RunEnd]:
    """Run requests in one process, and yield their ends, at least one."""
    request_file = folder / "runs.jsonl"
    request_file.write_text("".join(json.dumps(asdict(r)) + "\n" for r in requests), encoding="utf-8")
    with (folder / "said.txt").open("wb") as log:
        worker = Worker([*command, str(request_file)], talks=False, output=log, env=_variables(folder), cwd=folder)
    with worker:
        tolerance = seconds + start
        for request in requests:
            end = _await_end(worker, request, folder / "said.txt", tolerance, memory)
            yield end
            if not end.version:  # the process cannot be used any more
                return
            tolerance = seconds


def _await_end(worker: Worker, request: Request, log: Path, tolerance: float, memory: int) -> RunEnd:
    """Wait for the end of a run; stop waiting if it crashes, hangs or takes too much memory."""
    start = time.monotonic()
    while True:
        status = worker.status  # read first, so that its last output is not missed
        seconds = time.monotonic() - start
        if (end := _read_end(request)) is not None:
            return end
        if status is not None:
            message = last_line(tail(log))[:300] or "it said nothing"
            return RunEnd("crashed", f"{_format_status(status)}: {message}", "", seconds)
        if seconds > tolerance:
            return RunEnd("hung", f"no answer within {tolerance:.0f} s", "", seconds)
        if (n_bytes := worker.held_bytes) > memory:
            return RunEnd(
                "too large", f"it used {n_bytes / 1e9:.1f} GB, expected at most {memory / 1e9:.1f} GB", "", seconds
            )
        time.sleep(_LOOK)


def _read_end(request: Request) -> RunEnd | None:
    """Read the outcome and duration of a run, which its process measured; None before its end."""
    path = Path(request.out) / "said.json"
    if not path.exists():
        return None
    answer = json.loads(path.read_text(encoding="utf-8"))
    if answer["state"] == "done":
        return RunEnd("done", "", answer["version"], answer["seconds"])
    is_refusal = answer["error"].partition(":")[0] in REFUSALS
    error = answer["error"] if is_refusal else f"{answer['error']} ({answer['place']}, {answer['phase']})"
    return RunEnd("refused" if is_refusal else "crashed", error, answer["version"], answer["seconds"])


def _variables(folder: Path) -> dict[str, str]:
    """Return the environment of an engine's process: `folder` is its home, and no proxy leads outside."""
    base = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    homes = {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    shared = [str(ADAPTERS), str(Path(llorch.engines.dumps.writers.__path__[0]))]
    return base | proxies | offline | homes | {"PYTHONPATH": os.pathsep.join(shared), "PYTHONDONTWRITEBYTECODE": "1"}


def _format_status(status: int) -> str:
    return f"its process ended with status {status}" if status >= 0 else f"ended by {signal_name(status)}"
