"""Interleaved rounds of engines in processes of their own: medians, ranges, and ratios of the paired rounds.

Rounds of all engines are interleaved, so that a drift of the machine meets each alike. Threads that wait for each other
by spinning, as OpenBLAS's and llama.cpp's do, become many times slower when another program wants a core. So a timing
during which others had more than `OTHERS` of the processors is left out, and the number of quiet ones is printed.
"""

import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from llorch.apps.bench.measure import processor
from llorch.runtime.waiting import ASLEEP

ROOT = Path(__file__).resolve().parents[2]
OTHERS = 0.05  # largest share of the processors in a quiet round
PACKAGES = ("numpy", "torch", "transformers", "peft", "llama-cpp-python")
Samples = dict[str, list[tuple[float, float]]]  # quantity: (value, share of other programs) of each round
Values = Mapping[str, Callable[[dict[str, Any]], float]]  # quantity: its value in the answer of a call
Action = tuple[str, list[object], Values]  # method, arguments, quantities that are measured


class NotRun(Exception):
    """Reason why an engine did not run."""


@dataclass(frozen=True)
class Engine:
    """Description of an engine with a model."""

    name: str
    kind: str = ""  # class in engines.py
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    fallback: Mapping[str, Any] | None = None  # options for an engine that crashes without them
    reference: bool = False  # others are compared with it
    of_variant: str | None = None  # the only variant that is compared with it; None: all
    root: Path = ROOT  # checkout of llorch
    note: str = ""
    actions: Sequence[Action] = ()  # calls of a round, if they are not those of the others

    @property
    def title(self) -> str:
        """Name and variant."""
        return f"{self.name} {self.variant}".strip()


class Process:
    """Engine in a process."""

    def __init__(self, engine: Engine, threads: int, **variables: str) -> None:
        """Start it and wait until the model is loaded; raise NotRun if that fails."""
        count = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        setup = {"kind": engine.kind, "path": engine.path, "threads": threads, "options": dict(engine.options)}
        waits = ASLEEP if engine.name.startswith("llorch") else {}  # as the commands of llorch
        self._stderr = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-P", str(Path(__file__).with_name("engines.py"))]
        self._process = subprocess.Popen(
            [*command, json.dumps(setup | {"start": time.monotonic()})], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._stderr,
            env=os.environ | {"PYTHONPATH": str(engine.root), "HF_HUB_OFFLINE": "1"} | count | waits | variables,
        )  # fmt: skip
        self.marks = self._read("loading")
        self._peak = self.marks["load"]["peak"]

    def ask(self, method: str, *args: object) -> dict[str, Any]:
        """Call a method; return its value, seconds, processor time and memory, which also counts earlier calls."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps([method, *args]), file=self._process.stdin, flush=True)
        answer = self._read(method)
        self._peak = max(self._peak, answer["peak"])
        return answer | {"peak_of_all": self._peak}

    def _read(self, call: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or "{}")
        if "error" in answer or not answer:
            status = self._process.wait()
            self._stderr.seek(0)
            last = (self._stderr.read().strip().splitlines() or ["it printed nothing"])[-1]
            self.close()
            end = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}: {last}"
            raise NotRun(answer.get("error", f"{end} in {call}"))
        return answer

    def close(self) -> None:
        """End the process."""
        if not self._stderr.closed:
            self._process.kill()
            self._process.communicate()
            self._stderr.close()


class Results:
    """Rows of a case, and what did not run."""

    def __init__(self) -> None:
        """Start without rows."""
        self.rows: list[dict[str, Any]] = []
        self.not_run: list[str] = []
        self.model = ""  # name of the model that is measured now

    def skip(self, title: str, reason: object) -> None:
        """Record and print what did not run, and why."""
        self.not_run.append(f"{f'{self.model} {title}'.strip()}: {' '.join(str(reason).split())[:300]}")
        click.echo(f"NOT RUN: {self.not_run[-1]}")

    def add(
        self, engines: Iterable[Engine], samples: Mapping[str, Samples], units: Mapping[str, str], n_bytes: int = 0
    ) -> None:
        """Add a row for each engine and quantity; `n_bytes` of weights for each token give a bandwidth."""
        ran = [engine for engine in engines if engine.title in samples]
        for engine in ran:
            references = [
                other for other in ran if other.reference and other.title != engine.title and not engine.reference
                and other.of_variant in (None, engine.variant)
            ]  # fmt: skip
            for what, measured in samples[engine.title].items():
                row: dict[str, Any] = {
                    "model": self.model,
                    "engine": engine.name,
                    "variant": engine.variant,
                    "what": what,
                }
                row |= summary(measured) | {"unit": units[what]}
                samples_by_name = {other.name: samples[other.title] for other in references}
                pairs = {
                    name: ratio(measured, by[what])
                    for name, by in samples_by_name.items()
                    if all(value for value, _ in by.get(what, [(0, 0)]))
                }
                row |= {"ratios": pairs} if pairs else {}
                row |= {"reference": True} if engine.reference else {}
                if units[what] == "GB/s" or (n_bytes and units[what] == "tokens/s"):
                    row["bandwidth"] = row["value"] * (1 if units[what] == "GB/s" else n_bytes / 1e9)
                self.rows.append(row | ({"note": engine.note} if engine.note else {}))


def summary(measured: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the median and the range of the quiet rounds, or of all rounds if none was quiet."""
    n_quiet = sum(share <= OTHERS for _, share in measured)
    values = [value for value, share in measured if share <= OTHERS or n_quiet == 0]
    span = {"value": statistics.median(values), "low": min(values), "high": max(values)}
    return span | {"rounds": len(measured), "quiet": n_quiet}


def ratio(measured: Sequence[tuple[float, float]], reference: Sequence[tuple[float, float]]) -> list[float]:
    """Return the median, lowest and highest ratio of single rounds, so that a drift meets both values."""
    pairs = list(zip(measured, reference, strict=True))
    ratios = [a[0] / b[0] for a, b in pairs if max(a[1], b[1]) <= OTHERS] or [a[0] / b[0] for a, b in pairs]
    return [statistics.median(ratios), min(ratios), max(ratios)]


Measure = Callable[[Engine, int], tuple[Engine, dict[str, tuple[float, float]]]]


def interleave(
    engines: Sequence[Engine], measure: Measure, rounds: range, results: Results
) -> tuple[list[Engine], dict[str, Samples]]:
    """Measure every engine in every round, whose number is given; an engine that raises NotRun has no samples.

    Return the engines as they ran: with the options that one needs which crashes in its defaults.
    """
    samples, ran = dict[str, Samples](), {engine.title: engine for engine in engines}
    for number in rounds:
        for title in list(ran):
            click.echo(f"round {number} of {rounds[-1]}: {title}", err=True)
            try:
                ran[title], measured = measure(ran[title], number)
            except NotRun as error:
                results.skip(title, error)
                del ran[title]
                samples.pop(title, None)
                continue
            for what, sample in measured.items():
                samples.setdefault(title, {}).setdefault(what, []).append(sample)
    return list(ran.values()), samples


def interleave_loaded(
    engines: Sequence[Engine], actions: Sequence[Action], rounds: int, threads: int, results: Results
) -> tuple[list[Engine], dict[str, Samples]]:
    """Measure engines that stay loaded, after a warm-up round; see `interleave`."""
    processes: dict[str, Process] = {}

    def measure(engine: Engine, number: int) -> tuple[Engine, dict[str, tuple[float, float]]]:
        if engine.title not in processes:
            processes[engine.title], engine = start(engine, threads)
        try:
            measured = run(processes[engine.title], engine.actions or actions)
        except NotRun as error:
            processes[engine.title], engine = start(fall_back(engine, error), threads)
            measured = run(processes[engine.title], engine.actions or actions)
        return engine, measured if number else {}

    try:
        return interleave(engines, measure, range(rounds + 1), results)
    finally:
        for process in processes.values():
            process.close()


def start(engine: Engine, threads: int, **variables: str) -> tuple[Process, Engine]:
    """Start an engine, with the options that it needs if it crashes in its defaults; return it as it runs."""
    try:
        return Process(engine, threads, **variables), engine
    except NotRun as error:
        engine = fall_back(engine, error)
        return Process(engine, threads, **variables), engine


def fall_back(engine: Engine, error: NotRun) -> Engine:
    """Return an engine with the options that it needs; raise the error again if it has them."""
    if engine.fallback is None:
        raise error
    words = ", ".join(f"{name}={option}" for name, option in engine.fallback.items())
    note = f"{engine.name} with {words}: in its defaults it {error}"
    return replace(engine, options={**engine.options, **engine.fallback}, fallback=None, note=note)


def run(process: Process, actions: Sequence[Action]) -> dict[str, tuple[float, float]]:
    """Call the methods in order; return each quantity, and the share of other programs meanwhile."""
    measured = {}
    for method, args, values in actions:
        answer = process.ask(method, *args)
        measured |= {what: (value(answer), answer["others"]) for what, value in values.items()}
    return measured


def machine() -> dict[str, Any]:
    """Describe the machine, the kernels that NumPy's OpenBLAS uses, and the versions of packages."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": processor(), "cores": os.cpu_count(), "openblas": openblas_kernels(),
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE", "unset"), "versions": versions,
        "commit": commit or "unknown", "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def describe_machine() -> str:
    """Describe the machine in one line."""
    host = machine()
    return f"machine: {host['processor']}, {host['cores']} cores; OpenBLAS kernels: {host['openblas']}"


def openblas_kernels() -> str:
    """Name the processor for which NumPy's OpenBLAS chose its kernels; `OPENBLAS_CORETYPE` overrides it."""
    import numpy as np

    for file in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        name = getattr(ctypes.CDLL(str(file)), "scipy_openblas_get_corename64_", None)
        if name is not None:
            name.restype = ctypes.c_char_p
            return name().decode()
    return "unknown"
