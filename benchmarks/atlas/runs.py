"""Runs of an engine in processes of their own: one that hangs, crashes or takes all memory ends with an outcome.

A process does run after run. When one of them ends the process, or is silent for too long, the next process goes on
behind it. No process reaches the network: the hub is told to be offline, every proxy is a port that nobody listens at.
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
_MARK = "llorch-requirements.txt"  # what is installed, once all of it is


class NotInstalled(Exception):
    """An engine that cannot be had here; says why."""


def is_to_install(engine: AtlasEngine, home: Path) -> bool:
    """Tell if `python_of` would fetch packages."""
    return not engine.why_not and not engine.is_reference_engine and not _is_made(engine, _folder_of(engine, home))


def download_bytes(engine: AtlasEngine) -> int:
    """Read how much its packages are, from the first line of its lock: `# 355000000 bytes to download`."""
    return int(engine.lock.read_text(encoding="utf-8").split(maxsplit=2)[1])


def _folder_of(engine: AtlasEngine, home: Path) -> Path:
    return home / "environments" / engine.script


def _is_made(engine: AtlasEngine, folder: Path) -> bool:
    """Tell if the folder holds a complete environment of the engine's current lock file."""
    mark = folder / _MARK
    return mark.exists() and mark.read_text(encoding="utf-8") == engine.lock.read_text(encoding="utf-8")


def python_of(engine: AtlasEngine, home: Path) -> Path:
    """Return the interpreter of an engine's environment below a folder; make the environment if it is missing.

    A reference engine uses the interpreter that runs llorch.

    Raises:
        NotInstalled: Its packages cannot be had, or not in `INSTALL` seconds.
    """
    if engine.why_not:
        raise NotInstalled(engine.why_not)
    if engine.is_reference_engine:
        return Path(sys.executable)
    folder = _folder_of(engine, home)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if _is_made(engine, folder):
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
        said = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in said if "ERROR" in line.upper()] or said or ["no message"]
        raise NotInstalled(f"pip cannot install its packages: {errors[0].strip()[:300]}")


SECONDS, START = 60.0, 60.0  # limit of a run, and what an engine may take for its start besides
PROGRAM = 120.0  # seconds of a report's program
MEMORY = 6 << 30  # bytes of a process and its children
REFUSALS = ("ValueError", "NotImplementedError")  # what is raised on purpose
_LOOK = 0.1  # seconds between looks at a process


@dataclass(frozen=True)
class Request:
    """Request to an adapter, see its harness."""

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
    start: float = START, memory: int = MEMORY, report: Callable[[RunEnd], None] = lambda ended: None,
) -> list[RunEnd]:  # fmt: skip
    """Run an adapter on all requests, even if some runs fail.

    Args:
        command: The interpreter and the script.
        requests: In their order; what an earlier attempt left in their folders is not taken for a result.
        folder: Folder for the list, and for messages and files of the engine.
        seconds: Time limit of a run.
        start: Additional time for the first run of a process.
        memory: Number of bytes that the processes of a run may hold.
        report: Called with a line about the end of each run.

    Returns:
        The end of each run.
    """
    ended: list[RunEnd] = []
    for request in requests:
        (Path(request.out) / "said.json").unlink(missing_ok=True)
    while len(ended) < len(requests):
        for each in _one_process(command, requests[len(ended) :], folder, seconds, start, memory):
            ended.append(each)
            report(each)
    return ended


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


def _one_process(
    command: Sequence[str], requests: Sequence[Request], folder: Path, seconds: float, start: float, memory: int
) -> Iterator[RunEnd]:
    """Yield the runs of one process, at least one."""
    asked = folder / "runs.jsonl"
    asked.write_text("".join(json.dumps(asdict(each)) + "\n" for each in requests), encoding="utf-8")
    with (folder / "said.txt").open("wb") as said:
        worker = Worker([*command, str(asked)], talks=False, output=said, env=_variables(folder), cwd=folder)
    with worker:
        tolerance = seconds + start
        for request in requests:
            ended = _watched(worker, request, folder / "said.txt", tolerance, memory)
            yield ended
            if not ended.version:  # the process is not to be used any more
                return
            tolerance = seconds


def _watched(worker: Worker, request: Request, words: Path, tolerance: float, memory: int) -> RunEnd:
    """Wait for the end of an engine's run; end the wait if the run crashes, hangs or takes too much memory."""
    since = time.monotonic()
    while True:
        status = worker.status  # before the look: what it wrote last is seen
        seconds = time.monotonic() - since
        if (found := _read_end(request)) is not None:
            return found
        if status is not None:
            said = last_line(tail(words))[:300] or "it said nothing"
            return RunEnd("crashed", f"{_way_to_end(status)}: {said}", "", seconds)
        if seconds > tolerance:
            return RunEnd("hung", f"no answer within {tolerance:.0f} s", "", seconds)
        if (held := worker.held_bytes) > memory:
            return RunEnd(
                "too large", f"it used {held / 1e9:.1f} GB, expected at most {memory / 1e9:.1f} GB", "", seconds
            )
        time.sleep(_LOOK)


def _read_end(request: Request) -> RunEnd | None:
    """Read how a run ended and how long it took: runs that end between two looks would take no time by this clock."""
    path = Path(request.out) / "said.json"
    if not path.exists():
        return None
    said = json.loads(path.read_text(encoding="utf-8"))
    if said["state"] == "done":
        return RunEnd("done", "", said["version"], said["seconds"])
    meant = said["error"].partition(":")[0] in REFUSALS
    error = said["error"] if meant else f"{said['error']} ({said['place']}, {said['phase']})"
    return RunEnd("refused" if meant else "crashed", error, said["version"], said["seconds"])


def _variables(folder: Path) -> dict[str, str]:
    """Return the environment variables of an engine's process: `folder` is its home, and no proxy leads outside."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    places = {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    shared = [str(ADAPTERS), str(Path(llorch.engines.dumps.writers.__path__[0]))]
    return kept | nowhere | offline | places | {"PYTHONPATH": os.pathsep.join(shared), "PYTHONDONTWRITEBYTECODE": "1"}


def _way_to_end(status: int) -> str:
    return f"its process ended with status {status}" if status >= 0 else f"ended by {signal_name(status)}"
