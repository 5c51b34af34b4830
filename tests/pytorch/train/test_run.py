"""A run in its folder: what it leaves there, how it is taken up again as if nothing had been, and what it refuses."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_disk import leftovers
from training_runs import Silent, ragged_rows, small_settings, trained, write_rows

from llorch.errors import FormatError, MissingExtra
from llorch.lora.files import read_adapter
from llorch.model import load
from llorch.pytorch.train.run import Run
from llorch.pytorch.train.trainer import NonFiniteLoss
from llorch.train.settings import TrainSettings
from llorch.train.snapshots import SnapshotStore
from llorch.train.stopping import Stopped
from llorch.verify.resume import compare_runs

LASTING = ("log.jsonl", "curve.svg", "adapter_model.safetensors", "adapter_config.json", "llorch_base.json")


def run(settings: Any, folder: Path, **how: Any) -> Any:
    return Run(settings, folder, Silent(), **how).run()


def run_until(step: int, settings: Any, folder: Path, *, signal_number: int = 15) -> None:
    """Let a run be stopped by a signal after a step."""

    class Stopping(Silent):
        def made(self, report: Any) -> None:
            if report.step == step:
                os.kill(os.getpid(), signal_number)

    with pytest.raises(Stopped, match=f"stopped after {step} of ") as stopped:
        Run(settings, folder, Stopping()).run()
    assert stopped.value.exit_code == 128 + signal_number


def lasting(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LASTING}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_leaves_log_curve_snapshots_and_an_adapter(tmp_path: Path):
    folder = tmp_path / "run"
    settings = small_settings(tmp_path, eval_every=2, save_every=1)
    result = run(settings, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*LASTING, "run.json", "snapshots", "timing.jsonl"])
    assert sorted(path.name for path in (folder / "snapshots").iterdir()) == ["step-00000003", "step-00000004"]
    assert [(one["step"], "valid_loss" in one) for one in lines(folder)] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True)
    ]  # fmt: skip
    want = trained(settings, steps=4)
    adapter = read_adapter(folder, load("micro-qwen3").config)
    assert {n: a.tobytes() for n, a in adapter.flat().items()} == {
        n: a.tobytes() for n, a in want.adapter.flat().items()
    }
    assert (result.steps, result.n_parameters) == (4, want.adapter.n_parameters)
    assert result.valid_loss["last"] == (4, want.validate())


def test_equal_runs_leave_equal_bytes(tmp_path: Path):
    settings = small_settings(tmp_path, dropout=0.1)
    run(settings, tmp_path / "a")
    run(settings, tmp_path / "b")
    assert lasting(tmp_path / "a") == lasting(tmp_path / "b")


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run stopped after step 3 of 4, with a snapshot of step 2 before."""
    run_until(3, small_settings(tmp_path, save_every=2), tmp_path / "run")
    return tmp_path / "run"


def assert_the_same(one: Path, other: Path) -> None:
    assert lasting(one) == lasting(other)
    assert compare_runs(one, other).equal
    assert (one / "run.json").read_bytes() == (other / "run.json").read_bytes()
    assert leftovers(other) == []


@pytest.mark.parametrize("step", [1, 2, 4, 7])  # first, with a validation, the end of an epoch, last
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, step: int):
    how = {"dropout": 0.2, "batch_size": 1, "accumulation": 2, "eval_every": 2, "save_every": 3, "steps": 7}
    settings = small_settings(tmp_path, **how)
    run(settings, tmp_path / "straight")
    run_until(step, settings, tmp_path / "stopped")
    run(settings, tmp_path / "stopped", resume=True)
    assert_the_same(tmp_path / "straight", tmp_path / "stopped")


def test_a_damaged_snapshot_is_named_and_the_one_before_is_taken(tmp_path: Path, stopped: Path):
    settings, watcher = small_settings(tmp_path, save_every=2), Silent()
    run(settings, tmp_path / "straight")
    file = stopped / "snapshots" / "step-00000003" / "snapshot.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    Run(settings, stopped, watcher, resume=True).run()
    assert watcher.notes[0].startswith(f"passed over: {file}: Inconsistent: damaged: ")
    assert_the_same(tmp_path / "straight", stopped)


def test_a_validation_before_the_stop_is_made_again_and_stands_in_the_log_once(tmp_path: Path):

    class Stopping(Silent):
        def validated(self, step: int, loss: float) -> None:
            if step == 2:
                os.kill(os.getpid(), 15)

    settings = small_settings(tmp_path, eval_every=2, save_every=0)
    run(settings, tmp_path / "straight")
    with pytest.raises(Stopped, match="stopped after 2 of "):
        Run(settings, tmp_path / "stopped", Stopping()).run()
    run(settings, tmp_path / "stopped", resume=True)
    assert lasting(tmp_path / "stopped") == lasting(tmp_path / "straight")


def test_a_run_that_is_over_stays_as_it_is_and_without_its_snapshots_starts_again(tmp_path: Path):
    settings, watcher = small_settings(tmp_path), Silent()
    run(settings, tmp_path / "run")
    before = lasting(tmp_path / "run")
    assert run(settings, tmp_path / "run", resume=True).steps == 4
    assert lasting(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "snapshots")
    Run(settings, tmp_path / "run", watcher, resume=True).run()
    assert lasting(tmp_path / "run") == before
    assert watcher.notes == ["there is no snapshot yet; the run starts again"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run.json", "there is a run in this folder; go on with --resume"),
        ("letter.txt", "expected a new or empty folder"),
    ],
)
def test_a_folder_with_a_run_or_something_else_in_it_is_refused(tmp_path: Path, name: str, expected: str):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / name).write_text("dear")
    with pytest.raises(ValueError, match=expected):
        run(small_settings(tmp_path), tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == [name]


def test_there_must_be_a_run_to_resume(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"there is no run to resume, it has no run\.json"):
        run(small_settings(tmp_path), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_a_run_killed_before_it_wrote_anything_can_be_started_again(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.4711.tmp").touch()
    run(small_settings(tmp_path, steps=1), tmp_path / "run")
    assert leftovers(tmp_path / "run") == []


def other_threads(settings: TrainSettings) -> TrainSettings:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return settings


def other_data(settings: TrainSettings) -> TrainSettings:
    write_rows(Path(settings.data) / "train.jsonl", ragged_rows(8, seed=4))
    return settings


CHANGES: dict[str, Callable[[TrainSettings], TrainSettings]] = {
    r"base: saved \w{57}\.\.\., now \w{57}\.\.\.; ": lambda settings: replace(settings, model="micro-llama3"),
    r"data: saved \w{57}\.\.\., now \w{57}\.\.\.; ": other_data,
    r"settings\.lr: saved 0\.005, now 0\.02; ": lambda settings: replace(settings, lr=0.02),
    r"settings\.r: saved 3, now 4; ": lambda settings: replace(settings, r=4),
    r"settings\.dtype: saved float32, now float64; ": lambda settings: replace(settings, dtype="float64"),
    r"total_steps: saved 4, now 8; ": lambda settings: replace(settings, steps=8),
    r"environment\.threads: saved \d, now \d; ": other_threads,
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_run_that_has_changed_is_refused_with_the_difference(line: str, tmp_path: Path, stopped: Path):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    settings = CHANGES[line](small_settings(tmp_path))
    with pytest.raises(FormatError, match=rf"step-00000003: Inconsistent: the run has.*{line}.*--allow-change"):
        run(settings, stopped, resume=True)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_another_version_of_a_library_is_refused(tmp_path: Path, stopped: Path):
    store = SnapshotStore(stopped)
    found = store.newest()
    assert found is not None
    found.record["identity"]["environment"]["packages"]["torch"] = "2.0.0"
    store.save(found.step, found.tensors, found.record)
    now = re.escape(torch.__version__)
    with pytest.raises(FormatError, match=rf"packages\.torch: saved 2\.0\.0, now {now}; undo the change"):
        run(small_settings(tmp_path), stopped, resume=True)


def test_a_change_that_is_allowed_is_said_and_written_down(tmp_path: Path, stopped: Path):
    watcher = Silent()
    Run(small_settings(tmp_path, lr=0.25), stopped, watcher, resume=True, allow_change=True).run()
    assert watcher.notes == ["not bit-exact any more: settings.lr: saved 0.005, now 0.25"]
    record = json.loads((stopped / "run.json").read_text())
    assert record["changes"] == ["after step 3: settings.lr: saved 0.005, now 0.25"]
    assert [one["step"] for one in lines(stopped) if "loss" in one] == [1, 2, 3, 4]


@pytest.mark.parametrize(("schedule", "same"), [("constant", True), ("linear", False)])
def test_a_run_that_is_over_goes_on_for_more_steps(tmp_path: Path, schedule: str, same: bool):
    short, long = (small_settings(tmp_path, schedule=schedule, dropout=0.1, steps=steps) for steps in (2, 4))
    run(long, tmp_path / "straight")
    run(short, tmp_path / "run")
    watcher = Silent()
    assert Run(long, tmp_path / "run", watcher, resume=True).run().steps == 4
    assert watcher.notes == [
        "the run was over after 2 steps and goes on to 4; from here the rate is that of the "
        f"{schedule} schedule of 4 steps, {'' if same else 'so '}the bits are {'' if same else 'not '}"
        "those of a run that was begun for 4"
    ]
    assert (lasting(tmp_path / "run") == lasting(tmp_path / "straight")) == same
    rates = [[one["learning_rate"] for one in lines(tmp_path / name) if "loss" in one] for name in ("run", "straight")]
    assert rates[0][2:] == rates[1][2:]  # the schedule of all steps, from where the run goes on
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["changes"] == ["after step 2: total_steps: saved 2, now 4"]
    with pytest.raises(FormatError, match=r"has changed: settings\.lr: saved 0\.005, now 0\.25; undo"):
        run(replace(long, steps=5, lr=0.25), tmp_path / "run", resume=True)  # nothing else may differ


def test_a_run_cannot_be_resumed_beyond_its_end(tmp_path: Path):
    run(small_settings(tmp_path), tmp_path / "run")
    before = lasting(tmp_path / "run")
    with pytest.raises(ValueError, match="expected at most the 2 steps of the run, got a snapshot of step 4"):
        run(small_settings(tmp_path, steps=2), tmp_path / "run", resume=True, allow_change=True)
    assert lasting(tmp_path / "run") == before


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_snapshot(tmp_path: Path):
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteLoss, match="step 2: "):
        run(small_settings(tmp_path, lr=1e30, save_every=1, eval_every=0), folder)
    found = SnapshotStore(folder).newest()
    assert found is not None
    assert found.step == 1
    assert all(np.isfinite(array).all() for array in found.tensors.values() if array.dtype.kind == "f")
    with pytest.raises(NonFiniteLoss, match="step 1: expected a finite validation loss, got nan"):
        run(small_settings(tmp_path, lr=1e30, steps=1), tmp_path / "other")
    assert not any((one / "adapter_config.json").exists() for one in (folder, tmp_path / "other"))


def test_without_a_validation_set_there_is_none(tmp_path: Path):
    settings = small_settings(tmp_path)
    data = write_rows(tmp_path / "alone.jsonl", ragged_rows())
    result = run(replace(settings, data=str(data)), tmp_path / "run")
    assert result.valid_loss is None
    assert [one["step"] for one in lines(tmp_path / "run")] == [1, 2, 3, 4]


def test_without_matplotlib_everything_but_the_curve_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    watcher = Silent()
    Run(small_settings(tmp_path, steps=1), tmp_path / "run", watcher).run()
    assert watcher.notes[0].startswith(
        "no curve.svg: matplotlib is not installed; get it with: pip install 'llorch[train]'"
    )
    assert not (tmp_path / "run" / "curve.svg").exists()
    assert (tmp_path / "run" / "adapter_config.json").exists()


def test_without_tensorboard_a_run_that_wants_it_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"llorch\[tensorboard\]"):
        run(small_settings(tmp_path, tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()
