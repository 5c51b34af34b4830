"""Settings that must be equal to resume a run, and runs that a signal ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.faulty_disk import leftovers
from helpers.command_line import REPOSITORY
from helpers.refusals import assert_tells, refuses

from benchmarks.kill_resume import kill_and_resume, lines, start, write_data
from llorch.training.log import read_log
from llorch.training.resume import differences, environment, require_same
from llorch.training.snapshots import SnapshotStore
from llorch.training.stopping import StopRequest

SAVED: dict[str, Any] = {
    "base": "ab12",
    "data": "cd34",
    "total_steps": 30,
    "settings": {"lr": 1e-3, "target_modules": ["q_proj", "v_proj"], "dropout": 0.1, "max_length": None, "dora": False},
    "environment": {"threads": 2, "packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "tf32_matmul": False},
}


def changed(name: str, value: object) -> dict[str, Any]:
    values = deepcopy(SAVED)
    *above, last = name.split(".")
    inner = values
    for key in above:
        inner = inner[key]
    inner[last] = value
    return values


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("base", "ffff", "base: saved ab12, now ffff"),
        ("data", "ffff", "data: saved cd34, now ffff"),
        ("total_steps", 31, "total_steps: saved 30, now 31"),
        ("settings.lr", 2e-3, "settings.lr: saved 0.001, now 0.002"),
        ("settings.target_modules", ["q_proj"], "settings.target_modules: saved ['q_proj', 'v_proj'], now ['q_proj']"),
        ("settings.max_length", 64, "settings.max_length: saved None, now 64"),
        ("settings.dora", 0, "settings.dora: saved False, now 0"),
        ("settings.new", 1, "settings.new: saved nothing, now 1"),
        ("environment.threads", 4, "environment.threads: saved 2, now 4"),
        ("environment.packages.torch", "2.14.0", "environment.packages.torch: saved 2.13.0, now 2.14.0"),
        ("environment.packages", {}, "environment.packages.torch: saved 2.13.0, now nothing"),
        ("base", "f" * 99, "base: saved ab12, now " + "f" * 57 + "..."),
    ],
)
def test_a_difference_is_named_with_both_values(name: str, value: object, line: str):
    assert line in differences(SAVED, changed(name, value)).values()


def test_nothing_differs_from_itself_and_tuples_are_the_lists_that_json_makes_of_them():
    assert differences(SAVED, deepcopy(SAVED)) == {}
    assert differences({"a": [1, 2]}, {"a": (1, 2)}) == {}


def test_a_changed_run_is_refused_with_all_differences_and_the_remedy(tmp_path: Path):
    now = changed("base", "ffff") | {"data": "eeee"}
    both = differences(SAVED, now)
    assert len(both) == 2
    with refuses("Inconsistent", *both.values(), "--allow-change", where=tmp_path) as caught:
        require_same(SAVED, now, allow_change=False, path=tmp_path)
    assert caught.value.path == tmp_path


def test_allowed_changes_are_given_back_for_the_record(tmp_path: Path):
    now = changed("environment.threads", 4)
    assert require_same(SAVED, now, allow_change=True, path=tmp_path) == ["environment.threads: saved 2, now 4"]
    assert require_same(SAVED, SAVED, allow_change=False, path=tmp_path) == []


def test_the_environment_follows_the_switches_of_torch():
    before, threads = environment("cpu"), torch.get_num_threads()
    assert before["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    torch.set_num_threads(threads + 1)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = differences(before, environment("cpu"))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert [*found.values()] == [
        f"threads: saved {threads}, now {threads + 1}",
        f"float32_matmul_precision: saved {precision}, now medium",
    ]


@pytest.mark.gpu
def test_the_environment_of_a_device_holds_the_switches_of_cuda():
    before = environment("cuda:0")
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not allowed
    try:
        found = differences(before, environment("cuda:0"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert f"tf32_matmul: saved {allowed}, now {not allowed}" in found.values()


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
    assert outcome.extra_files == []
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
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],  # cheap tests below send both
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


TWICE = """
import os, signal
from llorch.training.stopping import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(int(stop.number), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_nothing_else_happens(number: signal.Signals):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.number is None
        os.kill(os.getpid(), number)
        assert stop.number == number
    assert signal.getsignal(number) is before


def test_second_signal_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "15\n")


def test_outside_the_main_thread_there_is_nothing_to_listen_to():
    seen = []

    def run() -> None:
        with StopRequest() as stop:
            seen.append(stop.number)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
