"""Kill a training run at random moments, resume it each time, and compare the end with an undisturbed run.

    python benchmarks/kill_resume.py                       100 kills
    python benchmarks/kill_resume.py --kills 10 --seed 3

Both are `llorch lora train` with dropout and accumulation, a snapshot at every step. SIGKILL comes at a random time
after a random step, sometimes while the program still starts. Compared bit by bit: the adapter, weights and
moments of the last snapshot, and the lines of the log.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from llorch.pytorch.train.verify_resume import RunComparison, compare_runs

FLAGS = (
    "micro-llama", "--r", "4", "--dropout", "0.1", "--batch-size", "2", "--accumulation", "2", "--save-every", "1",
    "--eval-every", "7", "--keep", "2",
)  # fmt: skip
STEPS_PER_KILL = 4  # least steps of a run per kill
EARLY = 0.1  # share of kills while the program starts
PATIENCE = 120.0  # seconds that a run may take to make a step


@dataclass
class Outcome:
    """Outcome of a run that was killed many times."""

    killed_after: list[int] = field(default_factory=list)  # lines of the log at each kill
    in_a_save: int = 0  # kills during the write of a snapshot
    extra_files: list[str] = field(default_factory=list)  # files that only one of the runs has
    comparison: RunComparison | None = None  # with the undisturbed run

    @property
    def exact(self) -> bool:
        """True if nothing differs and no extra file is left."""
        return self.comparison is not None and self.comparison.equal and not self.extra_files


def write_data(folder: Path, n: int = 40) -> Path:
    """Write a small data set of token ids, `n` rows to train on that differ in length."""
    draw = random.Random(0)
    folder.mkdir()
    for name, count in (("train", n), ("valid", 3)):
        rows = [[draw.randrange(3, 200) for _ in range(draw.randrange(5, 30))] for _ in range(count)]
        lines = [json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def start(folder: Path, data: Path, steps: int) -> subprocess.Popen[str]:
    """Start a run of `steps` steps, or resume the run in the folder."""
    words = [*FLAGS, "--data", str(data), "--steps", str(steps)]
    words += ["--resume"] if (folder / "run.json").exists() else []
    command = [sys.executable, "-m", "llorch", "lora", "train", *words, "-o", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(command, text=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def run_to_the_end(folder: Path, data: Path, steps: int) -> None:
    """Run to the end without a kill."""
    process = start(folder, data, steps)
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{folder}: ended with {process.returncode}: {errors}")


def kill_and_resume(folder: Path, *, kills: int, seed: int) -> Outcome:
    """Make both runs; the second is killed at moments drawn from the seed."""
    data, steps = write_data(folder / "data"), kills * STEPS_PER_KILL
    run_to_the_end(folder / "straight", data, steps)
    outcome, draw, killed = Outcome(), random.Random(seed), folder / "killed"
    while len(outcome.killed_after) < kills:
        spare = steps - lines(killed) - (kills - len(outcome.killed_after)) * 2
        kill_once(killed, data, steps, draw, max_lines=max(1, min(spare, 2 * STEPS_PER_KILL - 2)))
        outcome.killed_after.append(lines(killed))
        outcome.in_a_save += any((killed / "snapshots").glob(".new-*"))
    run_to_the_end(killed, data, steps)
    outcome.extra_files = sorted({*names(killed)} ^ {*names(folder / "straight")})
    outcome.comparison = compare_runs(folder / "straight", killed)
    return outcome


def kill_once(folder: Path, data: Path, steps: int, draw: random.Random, *, max_lines: int) -> None:
    """Start or resume, and kill after a random number of log lines, at most `most`, and a random delay."""
    process = start(folder, data, steps)
    early = draw.random() < EARLY
    n_lines = 0 if early else lines(folder) + draw.randint(1, max_lines)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and lines(folder) < n_lines and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 2.0 if early else 0.05))
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{folder}: ended with {process.returncode} before it was killed: {errors}")


def lines(folder: Path) -> int:
    """Count the lines of the log of a run so far."""
    log = folder / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def names(folder: Path) -> list[str]:
    """List all files of a run, hidden ones too."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*")]


@click.command()
@click.option("--kills", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(kills: int, seed: int) -> None:
    """Print the comparison; exit code 1 if anything differs."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_and_resume(Path(folder), kills=kills, seed=seed)
    comparison = outcome.comparison
    assert comparison is not None
    differing = [tensor.name for tensor in comparison.tensors if tensor.differing_bits]
    click.echo(f"{kills} kills in {time.monotonic() - begin:.0f} s, {outcome.in_a_save} of them inside a save")
    click.echo(f"killed after log line {', '.join(map(str, outcome.killed_after))}")
    click.echo(f"{len(differing)} of {len(comparison.tensors)} tensors differ {differing[:5]}")
    click.echo(f"{comparison.differing_lines} of {comparison.n_lines} log lines differ")
    click.echo(f"left behind: {outcome.extra_files or 'nothing'}")
    raise click.exceptions.Exit(not outcome.exact)


if __name__ == "__main__":
    main()
