"""What adapters share: it reads what is asked, and says how each run ended. Like them it needs no llorch.

An adapter is a script in the environment of its engine, which writes the dump that anyone can write:

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
    """A model, and what it is fed."""

    model: str  # a Hugging Face folder, or a GGUF file
    parts: list[list[int]]  # token ids of a sequence, a pass each
    out: str  # a folder for the dump
    scratch: str  # a folder for what the engine converts
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def passes(self) -> list[tuple[list[int], int]]:
        """Token ids and the position of the first."""
        starts = [sum(map(len, self.parts[:at])) for at in range(len(self.parts))]
        return list(zip(self.parts, starts, strict=True))


def answer(
    package: str,
    load: Callable[[HarnessRun], Any],
    compute: Callable[[Any, HarnessRun, DumpWriter], None],
    *,
    dtype: str = "float32",
) -> None:
    """Do the runs of the file that is named by the first argument, each a JSON object on a line, in their order.

    What comes of each is written to `said.json` beside its dump: {"state": "done" or "failed", "phase": "load" or
    "compute", "error", "version", "seconds" from load to the end of the dump}. One that is there already is not run
    again, so that a run that ends the process costs no other.
    """
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        run = HarnessRun(**json.loads(line))
        said = Path(run.out, "said.json")
        if said.exists():
            continue
        Path(run.out).mkdir(parents=True, exist_ok=True)
        Path(run.scratch).mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        outcome = _outcome(run, load, compute, package, dtype)
        words = {"version": version(package), **outcome, "seconds": time.perf_counter() - start}
        said.with_suffix(".part").write_text(json.dumps(words), encoding="utf-8")
        said.with_suffix(".part").replace(said)
    sys.stderr.flush()
    os._exit(0)  # some engines crash, or wait for a thread, while the interpreter ends


def _outcome(run: HarnessRun, load: Callable, compute: Callable, engine: str, dtype: str) -> dict[str, str]:
    """Load, compute and write the dump of one run; return its state, with phase, error and place if it failed."""
    phase = "load"
    try:
        loaded, phase = load(run), "compute"
        cache, flash = run.options.get("cache", ""), run.options.get("flash_attention", False)
        dtype = run.options.get("dtype", dtype)
        said = {"kv_cache": cache, "flash_attention": flash, "activations": run.options.get("activations", "")}
        with DumpWriter(run.out, engine=engine, dtype=dtype, **said) as dump:
            compute(loaded, run, dump)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}:{at.lineno}"
        return {"state": "failed", "phase": phase, "error": f"{type(error).__name__}: {error}"[:500], "place": place}
    return {"state": "done"}
