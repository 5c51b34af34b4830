"""Commands on a mesh: in this process with warm ranks, or as programs where a launcher or a signal is the subject."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import faulty_ranks

from helpers.command_line import REPOSITORY, invoke
from helpers.training_runs import small_data
from helpers.warm_ranks import warm_ranks
from llorch.pytorch.distributed import launch
from llorch.pytorch.train.snapshot_parts import read_parts
from llorch.runtime import launched_rank as torchrun
from llorch.training.snapshots import SnapshotStore

PROGRAM = str((REPOSITORY / "tests/support/faults/faulty_ranks.py").resolve(strict=True))  # a move fails every test
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TALK = ("model: ", "data: ", "steps: ", "step ", "train.jsonl: ", "valid.jsonl: ")  # of a run that goes well


def arguments(folder: Path, *options: str, mesh: str = "dp=2") -> list[str]:
    """A run of 8 steps, of which every second is saved."""
    data = folder / "data"
    if not data.exists():
        small_data(folder)
    shape = f"--steps 8 --batch-size 4 --save-every 2 --eval-every 100 --mesh {mesh}".split()
    return ["lora", "train", "micro-llama", "--data", str(data), "-o", str(folder / "run"), *shape, *options]


@dataclass(frozen=True)
class MeshResult:
    """Exit code of a command on a mesh, and the output of its launcher and its ranks."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        """Lines on stderr that tell of no progress."""
        return [line for line in self.stderr.splitlines() if not line.startswith(TALK)]


def invoke_on_mesh(folder: Path, *args: str, stdin: str = "", fault: str = "") -> MeshResult:
    """Run a command with `--mesh` in this process; its ranks are warm.

    Args:
        folder: Where the ranks write what they print.
        args: The command line.
        stdin: What the ranks read, all of them from one file.
        fault: What goes wrong on which rank, `name:rank`; see `faulty_ranks`.
    """
    files, on_ranks = [folder / f"{name}.txt" for name in ("stdin", "stdout", "stderr")], launch.on_ranks
    for file, text in zip(files, (stdin, "", ""), strict=True):
        file.write_text(text)

    def captured(n_ranks: int, work: Callable[..., Any], *work_args: Any, **kwargs: Any) -> Any:
        return on_ranks(n_ranks, _as_rank, files, fault, work, *work_args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, warm_ranks():
        patch.setattr(launch, "on_ranks", captured)
        patch.setattr(sys, "argv", ["llorch", *args])
        result = invoke(*args)
    _, out, err = (file.read_text() for file in files)
    return MeshResult(result.exit_code, result.stdout + out, err + result.stderr)


def _as_rank(files: list[Path], fault: str, work: Callable[..., Any], *work_args: Any) -> Any:
    """Read and print files instead of the streams, plant the fault, and work."""
    stdin, stdout, stderr = (os.open(file, os.O_RDWR | os.O_APPEND) for file in files)
    os.dup2(stdin, 0)
    if torchrun._stderr:  # of a rank that is not the first: it may speak when it ends
        os.dup2(stderr, torchrun._stderr[0])
    else:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
    faulty_ranks.inject(fault)
    return work(*work_args)


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


def failed(folder: Path, fault: str, *options: str, mesh: str = "dp=2") -> tuple[int, list[str]]:
    """Train with a fault; returns the exit code and the lines that tell of no progress."""
    result = invoke_on_mesh(folder, *arguments(folder, *options, mesh=mesh), fault=fault)
    return result.exit_code, result.lines


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
