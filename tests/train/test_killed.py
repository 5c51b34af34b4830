"""`llorch lora train` as a process of its own: killed, and told to stop."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import REPOSITORY
from faulty_disk import leftovers

from benchmarks.kill_resume import kill_and_resume, lines, start, write_data
from llorch.train.snapshots import SnapshotStore


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def wait_for(condition, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_with_the_bits_of_one_that_is_not(tmp_path: Path):
    outcome = kill_and_resume(tmp_path, kills=10, seed=0)  # the moments differ all the same
    print(f"killed after log lines {outcome.killed_after}, {outcome.in_a_save} times inside a save")
    assert len(outcome.killed_after) == 10
    comparison = outcome.comparison
    assert comparison is not None
    assert [tensor for tensor in comparison.tensors if tensor.differing_bits] == []
    assert comparison.differing_lines == 0
    assert outcome.left == []
    assert outcome.exact


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_step_saves_and_leaves_with_its_code(number: signal.Signals, data: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = start(folder, data, steps=500)
    wait_for(lambda: lines(folder) > 3)
    process.send_signal(number)
    begin = time.monotonic()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert time.monotonic() - begin < 60
    steps = SnapshotStore(folder).steps()
    assert f"stopped after {steps[-1]} of 500 steps, which are saved in {folder}; go on with --resume" in said
    assert leftovers(folder) == []


@pytest.fixture
def slow_steps(data: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose first step takes long."""
    words = [
        "micro-llama", "--data", str(data), "-o", str(tmp_path / "run"), "--accumulation", "20", "--batch-size",
        "2",
    ]  # fmt: skip
    script = "import time; from llorch.pytorch.train import trainer as t; made = t.Training.run_step\n"
    script += "t.Training.run_step = lambda self: (print('in a step', flush=True), time.sleep(60), made(self))[2]\n"
    script += f"from llorch.cli import main; main({['lora', 'train', *words]!r})"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    yield process
    process.kill()
    process.communicate()


def test_a_second_signal_leaves_in_the_middle_of_a_step(slow_steps: subprocess.Popen[str]):
    assert slow_steps.stdout is not None
    assert slow_steps.stdout.readline() == "in a step\n"
    slow_steps.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert slow_steps.poll() is None  # the step is finished first
    slow_steps.send_signal(signal.SIGTERM)
    assert slow_steps.wait(timeout=40) == 128 + signal.SIGTERM
