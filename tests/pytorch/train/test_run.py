"""A run in its folder: what it leaves there, how it is taken up again as if nothing had been, and what it refuses."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.faulty_disk import leftovers
from helpers.refusals import assert_tells, refuses
from helpers.training_runs import Silent, ragged_rows, run_steps, small_settings, write_rows

from llorch.lora.files import read_adapter
from llorch.model.model import load
from llorch.pytorch.train.run import Run
from llorch.pytorch.train.trainer import NonFiniteLoss
from llorch.pytorch.train.verify_resume import compare_runs
from llorch.runtime.errors import MissingExtra
from llorch.training.settings import TrainSettings
from llorch.training.snapshots import SnapshotStore
from llorch.training.stopping import Stopped

CURVE = "llorch.pytorch.train.run.draw_curve"
LASTING = ("log.jsonl", "curve.svg", "adapter_model.safetensors", "adapter_config.json", "llorch_base.json")


def write_curve(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write what a curve is drawn from: drawing takes as long as all steps together."""
    path.write_text(json.dumps([title, list(records)]))


@pytest.fixture
def drawn() -> None:
    """Let curves be drawn in a test."""


@pytest.fixture(autouse=True)
def curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(CURVE, write_curve)


def run(settings: Any, folder: Path, **options: Any) -> Any:
    return Run(settings, folder, Silent(), **options).run()


def run_until(step: int, settings: Any, folder: Path, *, signal_number: int = 15) -> None:
    """Let a run be stopped by a signal after a step."""

    class Stopping(Silent):
        def made(self, report: Any) -> None:
            if report.step == step:
                os.kill(os.getpid(), signal_number)

    with refuses(Stopped, f"{step} of {settings.steps}", "--resume", where=folder) as stopped:
        Run(settings, folder, Stopping()).run()
    assert stopped.value.exit_code == 128 + signal_number


def lasting_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LASTING}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("drawn")
def test_run_writes_log_curve_snapshots_and_adapter(tmp_path: Path):
    folder = tmp_path / "run"
    settings = small_settings(tmp_path, eval_every=2, save_every=1)
    result = run(settings, folder)
    made = [*LASTING, "rows.txt", "run.json", "snapshots", "timing.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(made)
    assert sorted(path.name for path in (folder / "snapshots").iterdir()) == ["step-00000003", "step-00000004"]
    assert [(one["step"], "valid_loss" in one) for one in lines(folder)] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True)
    ]  # fmt: skip
    expected = run_steps(settings, steps=4)
    assert {n: a.tobytes() for n, a in read_adapter(folder, load("micro-qwen3").config).flat().items()} == {
        n: a.tobytes() for n, a in expected.adapter.flat().items()
    }
    assert (result.steps, result.n_parameters) == (4, expected.adapter.n_parameters)
    assert result.valid_loss["last"] == (4, expected.validate())


@pytest.mark.usefixtures("drawn")
def test_equal_runs_leave_equal_bytes(tmp_path: Path):
    settings = small_settings(tmp_path, dropout=0.1)
    run(settings, tmp_path / "a")
    run(settings, tmp_path / "b")
    assert lasting_files(tmp_path / "a") == lasting_files(tmp_path / "b")


@pytest.fixture(scope="module")
def stopped_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    run_until(3, small_settings(folder, save_every=2), folder / "run")
    return folder


@pytest.fixture
def stopped_folder(stopped_template: Path, tmp_path: Path) -> Path:
    """A run stopped after step 3 of 4, with a snapshot of step 2 before; a copy, with its data beside it."""
    shutil.copytree(stopped_template, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def assert_equal_runs(actual: Path, expected: Path) -> None:
    assert lasting_files(actual) == lasting_files(expected)
    assert compare_runs(actual, expected).equal
    assert (actual / "run.json").read_bytes() == (expected / "run.json").read_bytes()
    assert leftovers(expected) == []


@pytest.fixture(scope="module")
def straight_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A run of 7 steps and its settings: an epoch is 4 of them."""
    folder = tmp_path_factory.mktemp("straight")
    how = {"dropout": 0.2, "batch_size": 1, "accumulation": 2, "eval_every": 2, "save_every": 3, "steps": 7}
    settings = small_settings(folder, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CURVE, write_curve)
        run(settings, folder / "run")
    return settings, folder / "run"


@pytest.mark.nightly_cases("1", "2")
@pytest.mark.parametrize("step", [1, 2, 4, 7])  # first, with a validation, the end of an epoch, last
def test_resumed_run_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path, straight_folder: tuple[Any, Path], step: int
):
    settings, whole = straight_folder
    run_until(step, settings, tmp_path / "stopped")
    run(settings, tmp_path / "stopped", resume=True)
    assert_equal_runs(whole, tmp_path / "stopped")


def test_damaged_snapshot_is_named_and_the_previous_one_is_used(tmp_path: Path, stopped_folder: Path):
    settings, watcher = small_settings(tmp_path, save_every=2), Silent()
    run(settings, tmp_path / "straight")
    file = stopped_folder / "snapshots" / "step-00000003" / "snapshot.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    Run(settings, stopped_folder, watcher, resume=True).run()
    assert_tells(watcher.notes[0], "Inconsistent", where=file)
    assert_equal_runs(tmp_path / "straight", stopped_folder)


def test_repeated_validation_after_resume_is_logged_once(tmp_path: Path):

    class Stopping(Silent):
        def validated(self, step: int, loss: float) -> None:
            if step == 2:
                os.kill(os.getpid(), 15)

    settings = small_settings(tmp_path, eval_every=2, save_every=0)
    run(settings, tmp_path / "straight")
    with refuses(Stopped, "2 of 4", where=tmp_path / "stopped"):
        Run(settings, tmp_path / "stopped", Stopping()).run()
    run(settings, tmp_path / "stopped", resume=True)
    assert lasting_files(tmp_path / "stopped") == lasting_files(tmp_path / "straight")


def test_finished_run_is_unchanged_by_resume_and_restarts_without_snapshots(tmp_path: Path):
    settings, watcher = small_settings(tmp_path), Silent()
    run(settings, tmp_path / "run")
    before = lasting_files(tmp_path / "run")
    assert run(settings, tmp_path / "run", resume=True).steps == 4
    assert lasting_files(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "snapshots")
    Run(settings, tmp_path / "run", watcher, resume=True).run()
    assert lasting_files(tmp_path / "run") == before
    (note,) = watcher.notes
    assert_tells(note, "no snapshot", "starts")


@pytest.mark.parametrize(
    ("name", "facts"), [("run.json", ("run", "--resume")), ("letter.txt", ("new", "empty"))], ids=["run", "letter"]
)
def test_a_folder_with_a_run_or_something_else_in_it_is_refused(tmp_path: Path, name: str, facts: tuple[str, ...]):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / name).write_text("dear")
    with refuses(ValueError, *facts, where=tmp_path / "home"):
        run(small_settings(tmp_path), tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == [name]


def test_resume_without_a_run_is_refused(tmp_path: Path):
    with refuses(FileNotFoundError, "run.json", "--resume", where=tmp_path / "run"):
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


CHANGES: dict[str, tuple[Callable[[TrainSettings], TrainSettings], str, str]] = {  # what, then from and to what
    "base": (lambda settings: replace(settings, model="micro-llama3"), r"\w{57}\.\.\.", r"\w{57}\.\.\."),
    "data": (other_data, r"\w{57}\.\.\.", r"\w{57}\.\.\. \(train\.jsonl:1 .*13 now\)\)"),
    "settings.lr": (lambda settings: replace(settings, lr=0.02), r"0\.005", r"0\.02"),
    "settings.r": (lambda settings: replace(settings, r=4), "3", "4"),
    "settings.dtype": (lambda settings: replace(settings, dtype="float64"), "float32", "float64"),
    "total_steps": (lambda settings: replace(settings, steps=8), "4", "8"),
    "environment.threads": (other_threads, r"\d", r"\d"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_run_is_refused_with_the_difference(name: str, tmp_path: Path, stopped_folder: Path):
    before = {path: path.read_bytes() for path in stopped_folder.rglob("*") if path.is_file()}
    change, old, new = CHANGES[name]
    with refuses("Inconsistent", "--allow-change", where=(name, "step-00000003")) as caught:
        run(change(small_settings(tmp_path)), stopped_folder, resume=True)
    assert re.search(rf"{re.escape(name)}\W+\w+ {old}\W+\w+ {new}[;,]", str(caught.value))
    assert {path: path.read_bytes() for path in stopped_folder.rglob("*") if path.is_file()} == before


def test_another_version_of_a_library_is_refused(tmp_path: Path, stopped_folder: Path):
    store = SnapshotStore(stopped_folder)
    found = store.newest()
    assert found is not None
    found.record["identity"]["environment"]["packages"]["torch"] = "2.0.0"
    store.save(found.step, found.tensors, found.record)
    with refuses("Inconsistent", "2.0.0", torch.__version__, where="environment.packages.torch"):
        run(small_settings(tmp_path), stopped_folder, resume=True)


def test_allowed_change_is_logged_and_recorded(tmp_path: Path, stopped_folder: Path):
    watcher = Silent()
    Run(small_settings(tmp_path, lr=0.25), stopped_folder, watcher, resume=True, allow_change=True).run()
    (note,), (change,) = watcher.notes, json.loads((stopped_folder / "run.json").read_text())["changes"]
    assert_tells(note, "settings.lr", "0.005", "0.25")
    assert_tells(change, "settings.lr", "0.005", "0.25", where="step 3")
    assert [one["step"] for one in lines(stopped_folder) if "loss" in one] == [1, 2, 3, 4]


@pytest.mark.nightly_cases("constant-True")
@pytest.mark.parametrize(("schedule", "same"), [("constant", True), ("linear", False)])
def test_finished_run_resumes_for_more_steps(tmp_path: Path, schedule: str, same: bool):
    short, long = (small_settings(tmp_path, schedule=schedule, dropout=0.1, steps=steps) for steps in (2, 4))
    run(long, tmp_path / "straight")
    run(short, tmp_path / "run")
    watcher = Silent()
    assert Run(long, tmp_path / "run", watcher, resume=True).run().steps == 4
    (note,) = watcher.notes
    assert_tells(note, "2 steps", 4, schedule)
    assert ("differ" in note.split()) != same
    assert (lasting_files(tmp_path / "run") == lasting_files(tmp_path / "straight")) == same
    rates = [[one["learning_rate"] for one in lines(tmp_path / name) if "loss" in one] for name in ("run", "straight")]
    assert rates[0][2:] == rates[1][2:]  # the schedule of all steps, from where the run goes on
    (change,) = json.loads((tmp_path / "run" / "run.json").read_text())["changes"]
    assert_tells(change, "step 2", 4, where="total_steps")
    with refuses("Inconsistent", "0.005", "0.25", where="settings.lr"):
        run(replace(long, steps=5, lr=0.25), tmp_path / "run", resume=True)  # nothing else may differ


def test_a_run_cannot_be_resumed_beyond_its_end(tmp_path: Path):
    run(small_settings(tmp_path), tmp_path / "run")
    before = lasting_files(tmp_path / "run")
    with refuses(ValueError, expected="2 steps", got="step 4"):
        run(small_settings(tmp_path, steps=2), tmp_path / "run", resume=True, allow_change=True)
    assert lasting_files(tmp_path / "run") == before


def test_non_finite_loss_ends_the_run_and_keeps_the_last_snapshot(tmp_path: Path):
    folder = tmp_path / "run"
    with refuses(NonFiniteLoss, where="step 2"):
        run(small_settings(tmp_path, lr=1e30, save_every=1, eval_every=0), folder)
    found = SnapshotStore(folder).newest()
    assert found is not None
    assert found.step == 1
    assert all(np.isfinite(array).all() for array in found.tensors.values() if array.dtype.kind == "f")
    with refuses(NonFiniteLoss, where="step 1", expected="validation", got="nan"):
        run(small_settings(tmp_path, lr=1e30, steps=1), tmp_path / "other")
    assert not any((one / "adapter_config.json").exists() for one in (folder, tmp_path / "other"))


def test_run_without_a_validation_set_does_not_validate(tmp_path: Path):
    settings = small_settings(tmp_path)
    data = write_rows(tmp_path / "alone.jsonl", ragged_rows())
    assert run(replace(settings, data=str(data)), tmp_path / "run").valid_loss is None
    assert [one["step"] for one in lines(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("drawn")
def test_without_matplotlib_everything_but_the_curve_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    watcher = Silent()
    Run(small_settings(tmp_path, steps=1), tmp_path / "run", watcher).run()
    assert_tells(watcher.notes[0], "curve.svg", "matplotlib", "pip install 'llorch[train]'")
    assert not (tmp_path / "run" / "curve.svg").exists()
    assert (tmp_path / "run" / "adapter_config.json").exists()


def test_run_with_missing_tensorboard_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with refuses(MissingExtra, "llorch[tensorboard]"):
        run(small_settings(tmp_path, tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()
