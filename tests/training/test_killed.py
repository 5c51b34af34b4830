"""`llorch lora train` as a process of its own: killed, and told to stop."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.faulty_disk import leftovers
from helpers.refusals import assert_tells

from benchmarks.kill_resume import kill_and_resume, lines, start, write_data
from llorch.training.log import read_log
from llorch.training.snapshots import SnapshotStore


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_run_that_is_killed_several_times_ends_with_the_bits_of_one_that_is_not(kills: int, tmp_path: Path):
    outcome = kill_and_resume(tmp_path, kills=kills, seed=0)  # the moments differ all the same
    print(f"killed after log lines {outcome.killed_after}, {outcome.in_a_save} times inside a save")
    assert len(outcome.killed_after) == kills
    comparison = outcome.comparison
    assert comparison is not None
    assert [tensor for tensor in comparison.tensors if tensor.differing_bits] == []
    assert comparison.differing_lines == 0
    assert outcome.left == []
    assert outcome.exact


@contextmanager
def interruptible() -> Iterator[None]:
    """Let processes that are started here obey SIGINT, even where the tests themselves ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],  # test_stopping sends both
    ids=["SIGTERM", "SIGINT"],
)
def test_signal_ends_the_step_saves_a_snapshot_and_exits_with_its_code(number: signal.Signals, tmp_path: Path):
    folder, steps = tmp_path / "run", 50_000  # more than are made before the signal, however slow this process is
    with interruptible():
        process = start(folder, write_data(tmp_path / "data"), steps=steps)
    begin = time.monotonic()
    while lines(folder) <= 3:
        assert process.poll() is None
        assert time.monotonic() - begin < 300
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    found = SnapshotStore(folder).newest()
    assert found is not None
    assert found.step == read_log(folder / "log.jsonl")[-1]["step"] < steps
    assert_tells(said.splitlines()[-1], found.step, steps, "--resume", where=folder)
    assert leftovers(folder) == []
