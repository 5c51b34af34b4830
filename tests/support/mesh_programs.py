"""Trainings on a mesh as a user starts them: programs, which end with a code and lines."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from command_line import REPOSITORY
from training_runs import small_data

from llorch.pytorch.train.snapshot_parts import read_parts
from llorch.train.snapshots import SnapshotStore

PROGRAM = str(REPOSITORY / "tests" / "support" / "faulty_ranks.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TALK = ("model: ", "data: ", "steps: ", "step ", "train.jsonl: ", "valid.jsonl: ")  # of a run that goes well


def arguments(folder: Path, *more: str, mesh: str = "dp=2") -> list[str]:
    """A run of 8 steps, of which every second is saved."""
    data = folder / "data"
    if not data.exists():
        small_data(folder)
    shape = "--steps 8 --batch-size 4 --save-every 2 --eval-every 100".split()
    return [
        "lora",
        "train",
        "micro-llama",
        "--data",
        str(data),
        "-o",
        str(folder / "run"),
        *shape,
        "--mesh",
        mesh,
        *more,
    ]


def started(command: list[str], fault: str = "") -> subprocess.Popen[str]:
    """A process, in a group of its own."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=REPOSITORY,
        env=os.environ | {"FAULT": fault},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its exit code, and the lines on stderr that tell of no progress."""
    _, said = process.communicate(timeout=300)
    return process.returncode, [line for line in said.splitlines() if not line.startswith(TALK)]


def failed(folder: Path, fault: str, *more: str, mesh: str = "dp=2") -> tuple[int, list[str]]:
    return ended(started([sys.executable, PROGRAM, *arguments(folder, *more, mesh=mesh)], fault))


def last_step(folder: Path) -> int:
    """Of the last snapshot, which is read."""
    found = SnapshotStore(folder / "run").newest(read_parts)
    assert found is not None
    assert not found.skipped
    return found.step


def adapter(folder: Path) -> bytes:
    return (folder / "run" / "adapter_model.safetensors").read_bytes()


def wait_for_steps(folder: Path, n_steps: int) -> None:
    log, end = folder / "run" / "log.jsonl", time.monotonic() + 120
    while not log.exists() or sum("loss" in json.loads(line) for line in log.read_text().splitlines()) < n_steps:
        assert time.monotonic() < end
        time.sleep(0.05)
