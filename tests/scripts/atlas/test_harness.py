"""What all adapters share: runs one after the other, and a word about how each ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import llorch.engines.dumps.writers
from benchmarks.atlas.catalogue import ADAPTERS
from llorch.engines.dumps.index import open_raw

ADAPTER = """
import os
import numpy as np
from harness import answer

def load(run):
    if run.model == "unknown":
        raise ValueError("this architecture is not supported")
    return 2.0

def compute(engine, run, dump):
    if run.model == "deadly":
        os.abort()
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        dump.add("logits", engine * np.float32([[first_position, *ids]]), tokens=[len(ids) - 1])

answer("numpy", load, compute)
"""


def adapt(folder: Path, models: list[str]) -> int:
    """Ask for a run of each model; the exit status."""
    (folder / "adapter.py").write_text(ADAPTER)
    ask = [
        {"model": model, "parts": [[5, 6], [7]], "out": str(folder / model), "scratch": str(folder / "scratch")}
        for model in models
    ]
    (folder / "runs.jsonl").write_text("\n".join(map(json.dumps, ask)))
    paths = [str(ADAPTERS), llorch.engines.dumps.writers.__path__[0]]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "adapter.py", "runs.jsonl"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode


def said(folder: Path, model: str) -> dict[str, str]:
    return json.loads((folder / model / "said.json").read_text())


def test_a_run_that_fails_or_ends_the_process_costs_no_other(tmp_path: Path):
    models = ["unknown", "right", "deadly", "last"]
    assert adapt(tmp_path, models) < 0
    assert said(tmp_path, "unknown") | {"version": "", "place": "", "seconds": 0} == {
        "version": "", "seconds": 0, "state": "failed", "phase": "load", "place": "",
        "error": "ValueError: this architecture is not supported",
    }  # fmt: skip
    assert said(tmp_path, "right") | {"seconds": 0} == {"version": np.__version__, "state": "done", "seconds": 0}
    assert not (tmp_path / "deadly" / "said.json").exists()
    before = (tmp_path / "right" / "said.json").stat().st_mtime_ns
    assert adapt(tmp_path, [one for one in models if one != "deadly"]) == 0
    assert said(tmp_path, "last")["state"] == "done"
    assert (tmp_path / "right" / "said.json").stat().st_mtime_ns == before


def test_what_an_adapter_writes_is_a_dump(tmp_path: Path):
    assert adapt(tmp_path, ["right"]) == 0
    dump = open_raw(tmp_path / "right")
    assert [(each.ids, each.first_position) for each in dump.passes] == [((5, 6), 0), ((7,), 2)]
