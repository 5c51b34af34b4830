"""Harness of the adapters: it reads the requests, and writes how each run ended. Like adapters, it needs no llorch.

An adapter is a script in the environment of its engine, which writes a dump in llorch's format:

    def load(run: HarnessRun) -> Model: ...                                 # may refuse: what it raises is quoted
    def compute(model: Model, run: HarnessRun, dump: DumpWriter) -> None:  # a pass after the other
        for ids, first_position in run.passes:
            dump.begin(ids, first_position)
            dump.add("block_out", array, layer=0)                     # names of stages; the last one is "logits"
    if __name__ == "__main__":
        answer("mlx-lm", load, compute)
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dump_writer import DumpWriter  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class HarnessRun:
    """Model and token ids of one run."""

    model: str  # a Hugging Face folder, or a GGUF file
    parts: list[list[int]]  # token ids of a sequence, a pass each
    out: str  # a folder for the dump
    scratch: str  # a folder for converted files of the engine
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def passes(self) -> list[tuple[list[int], int]]:
        """Token ids of each pass, and the position of the first."""
        starts = [sum(map(len, self.parts[:index])) for index in range(len(self.parts))]
        return list(zip(self.parts, starts, strict=True))


def answer(
    package: str,
    load: Callable[[HarnessRun], Any],
    compute: Callable[[Any, HarnessRun, DumpWriter], None],
    *,
    dtype: str = "float32",
) -> None:
    """Do the runs in the file named by the first argument, one JSON object a line, in their order.

    The outcome of each is written to `said.json` next to its dump: {"state": "done" or "failed", "phase": "load" or
    "compute", "error", "version", "seconds" from load to the end of the dump}. A run with such a file is not repeated,
    so a run that ends the process does not repeat earlier runs.
    """
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        run = HarnessRun(**json.loads(line))
        answer_file = Path(run.out, "said.json")
        if answer_file.exists():
            continue
        Path(run.out).mkdir(parents=True, exist_ok=True)
        Path(run.scratch).mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        outcome = _outcome(run, load, compute, package, dtype)
        record = {"version": version(package), **outcome, "seconds": time.perf_counter() - start}
        answer_file.with_suffix(".part").write_text(json.dumps(record), encoding="utf-8")
        answer_file.with_suffix(".part").replace(answer_file)
    sys.stderr.flush()
    os._exit(0)  # some engines crash, or wait for a thread, while the interpreter ends


def _outcome(run: HarnessRun, load: Callable, compute: Callable, engine: str, dtype: str) -> dict[str, str]:
    """Load, compute and write the dump of one run; return its state, with phase, error and place if it failed."""
    phase = "load"
    try:
        model, phase = load(run), "compute"
        cache, flash = run.options.get("cache", ""), run.options.get("flash_attention", False)
        dtype = run.options.get("dtype", dtype)
        options = {"kv_cache": cache, "flash_attention": flash, "activations": run.options.get("activations", "")}
        with DumpWriter(run.out, engine=engine, dtype=dtype, **options) as dump:
            compute(model, run, dump)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return {"state": "failed", "phase": phase, "error": f"{type(error).__name__}: {error}"[:500], "place": place}
    return {"state": "done"}
