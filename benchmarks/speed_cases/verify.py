"""Case `verify`: wall time and peak memory of whole commands of llorch, each in fresh processes, interleaved.

`{model}` in a command is the path of the model that the options describe, `{tokens}` some token ids for it.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from .decode import Setup, model_path
from .engines import busy_seconds
from .rounds import Engine, NotRun, Results, interleave

COMMANDS = ("--version", "verify", "verify --backend torch")
UNITS = {"wall time": "s", "processor time": "s", "peak memory": "GB"}


def run(setup: Setup, results: Results, commands: Sequence[str]) -> None:
    """Time the commands with the checkout of this file and, beside it, with another one."""
    engines = [Engine("llorch", variant=command) for command in commands or COMMANDS]
    if setup.beside is not None:
        name, root = f"llorch in {setup.beside.name}", setup.beside.resolve()
        engines += [
            replace(engine, name=name, root=root, reference=True, of_variant=engine.variant) for engine in engines
        ]
    needs_model = any("{model}" in engine.variant for engine in engines)
    with setup.models() if needs_model else nullcontext() as models:
        for kind in setup.kinds if needs_model else ["built-in models"]:
            results.model = kind
            path = model_path(setup, models, kind) if needs_model else None
            measure = partial(time_command, path=path, threads=setup.threads)
            ran, samples = interleave(engines, measure, range(1, setup.rounds + 1), results)
            results.add(ran, samples, UNITS)


def time_command(
    engine: Engine, _number: int, path: Path | None, threads: int | None
) -> tuple[Engine, dict[str, tuple[float, float]]]:
    """Run a command as a user does."""
    words = [
        word.format(model=path, tokens=",".join(map(str, range(100, 108)))) for word in shlex.split(engine.variant)
    ]
    env = {name: text for name, text in os.environ.items() if not name.endswith("_NUM_THREADS")}
    env |= {} if threads is None else {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as folder:
        busy, start = busy_seconds(), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "llorch", *words], stdout=subprocess.DEVNULL, stderr=errors, cwd=folder,
            env=env | {"PYTHONPATH": str(engine.root)},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise NotRun(f"ended with {process.returncode}: {errors.read().strip()[-200:]}")
    cpu = usage.ru_utime + usage.ru_stime
    others = max(0.0, busy_seconds() - busy - cpu) / seconds / (os.cpu_count() or 1)
    figures = {"wall time": seconds, "processor time": cpu, "peak memory": usage.ru_maxrss * 1024 / 1e9}
    return engine, {what: (value, others) for what, value in figures.items()}
