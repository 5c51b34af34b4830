"""Runs that are stopped and taken up again: nothing tells them from one that was not, and a changed one is refused."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY, invoke
from faulty_disk import leftovers
from interrupted_runs import run, settings_for

from benchmarks.kill_resume import write_data
from llorch.errors import FormatError
from llorch.train.settings import TrainSettings
from llorch.train.snapshots import SnapshotStore
from llorch.verify.resume import compare_runs

TRAIN = (sys.executable, "-m", "llorch", "lora", "train")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("runs") / "data", 14)


@pytest.fixture(scope="module")
def straight(data: Path) -> Path:
    run(data.parent / "straight", settings_for(data))
    return data.parent / "straight"


@pytest.fixture(scope="module")
def stopped(data: Path) -> Path:
    """A run stopped after step 5; tests work on copies."""
    run(data.parent / "stopped", settings_for(data), stop_at=5)
    return data.parent / "stopped"


def assert_the_same(one: Path, other: Path) -> None:
    found = compare_runs(one, other)
    differing = {tensor.name for tensor in found.tensors if tensor.differing_bits}
    assert differing <= {"rng/python"}  # which the shape checks of this test run draw from; a user's run has none
    assert found.differing_lines == 0
    assert (one / "run.json").read_bytes() == (other / "run.json").read_bytes()
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    assert leftovers(other) == []


@pytest.mark.parametrize("step", [1, 3, 4, 7], ids=["first", "in an epoch", "end of an epoch", "last"])
def test_a_run_taken_up_after_any_step_ends_with_the_same_bits(step: int, straight: Path, data: Path, tmp_path: Path):
    first = run(tmp_path / "run", settings_for(data), stop_at=step)
    store = SnapshotStore(tmp_path / "run")
    assert store.steps()[-1] == step
    second = run(tmp_path / "run", settings_for(data), resume=True)
    assert len(first.losses) + len(second.losses) == 7
    assert_the_same(straight, tmp_path / "run")


def test_a_run_that_came_to_its_end_can_be_taken_up_and_stays_as_it_is(straight: Path, data: Path, tmp_path: Path):
    shutil.copytree(straight, tmp_path / "run")
    assert run(tmp_path / "run", settings_for(data), resume=True).losses == []
    assert_the_same(straight, tmp_path / "run")


def test_a_run_without_a_snapshot_yet_starts_again(straight: Path, data: Path, tmp_path: Path):
    run(tmp_path / "run", settings_for(data), stop_at=1)
    shutil.rmtree(tmp_path / "run" / "snapshots")
    again = run(tmp_path / "run", settings_for(data), resume=True)
    assert again.notes[0] == "there is no snapshot yet; the run starts again"
    assert_the_same(straight, tmp_path / "run")


def test_a_run_killed_before_it_wrote_anything_can_be_started_again(data: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.4711.tmp").touch()
    run(tmp_path / "run", settings_for(data), stop_at=1)
    assert leftovers(tmp_path / "run") == []


def test_a_damaged_snapshot_is_named_and_the_one_before_is_taken(
    straight: Path, stopped: Path, data: Path, tmp_path: Path
):
    folder = shutil.copytree(stopped, tmp_path / "run")
    file = folder / "snapshots" / "step-00000005" / "snapshot.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    again = run(folder, settings_for(data), resume=True)
    assert again.notes[0].startswith(f"passed over: {file}: Inconsistent: damaged: ")
    assert len(again.losses) == 3  # from step 4
    assert_the_same(straight, folder)


@pytest.mark.usefixtures("no_bytecode")
def test_a_full_disk_ends_the_run_with_a_line_and_it_goes_on_when_there_is_room(
    straight: Path, stopped: Path, data: Path, tmp_path: Path
):
    folder = shutil.copytree(stopped, tmp_path / "run")
    limited = subprocess.run(  # files may have so many blocks of 512 or 1024 bytes
        ["sh", "-c", 'ulimit -f 18; exec "$@"', "sh", *TRAIN, "-o", str(folder), "--resume"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    reason = "snapshot of step 6 not saved: File too large; the one of step 5 is intact"
    assert limited.stderr.splitlines()[-1] == f"llorch: {folder}/snapshots: {reason}"
    assert limited.returncode == 74
    assert leftovers(folder) == []
    run(folder, settings_for(data), resume=True)
    assert_the_same(straight, folder)


def test_a_folder_that_a_run_is_writing_to_is_refused(stopped: Path, tmp_path: Path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    with SnapshotStore(folder).lock():
        second = invoke("lora", "train", "-o", str(folder), "--resume")
    assert second.exit_code == 2
    assert second.stderr == (
        f"llorch: {folder}: another run is writing to this folder; wait for it, or choose another one\n"
    )


def other_threads(settings: TrainSettings) -> TrainSettings:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return settings


def more_data(settings: TrainSettings) -> TrainSettings:
    with (Path(settings.data) / "train.jsonl").open("a") as file:
        file.write('{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}\n')
    return settings


CHANGES: dict[str, Callable[[TrainSettings], TrainSettings]] = {
    r"base: saved \w{57}\.\.\., now \w{57}\.\.\.; ": lambda settings: replace(settings, model="micro-llama3"),
    r"data: saved \w{57}\.\.\., now \w{57}\.\.\.; ": more_data,
    "settings.lr: saved 0.01, now 0.02; ": lambda settings: replace(settings, lr=0.02),
    "settings.dropout: saved 0.2, now 0.0; ": lambda settings: replace(settings, dropout=0.0),
    "settings.r: saved 2, now 3; ": lambda settings: replace(settings, r=3),
    "settings.seed: saved 0, now 1; ": lambda settings: replace(settings, seed=1),
    "settings.batch_size: saved 2, now 4; ": lambda settings: replace(settings, batch_size=4),
    "settings.dtype: saved float32, now float64; ": lambda settings: replace(settings, dtype="float64"),
    "total_steps: saved 7, now 8; ": lambda settings: replace(settings, steps=8),
    r"environment.threads: saved \d, now \d; ": other_threads,
}


@pytest.fixture
def copied(stopped: Path, data: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The stopped run and its data, for changing."""
    return shutil.copytree(stopped, tmp_path / "run"), shutil.copytree(data, tmp_path / "data")


@pytest.mark.parametrize("line", CHANGES)
def test_a_run_that_has_changed_is_refused_with_the_difference(line: str, copied: tuple[Path, Path]):
    folder, data = copied
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FormatError, match=rf"step-00000005: Inconsistent: the run has.*{line}.*--allow-change"):
        run(folder, CHANGES[line](settings_for(data)), resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_another_version_of_a_library_is_refused(copied: tuple[Path, Path]):
    folder, data = copied
    store = SnapshotStore(folder)
    found = store.newest()
    assert found is not None
    found.record["identity"]["environment"]["packages"]["torch"] = "2.0.0"
    store.save(found.step, found.tensors, found.record)
    now = re.escape(torch.__version__)
    with pytest.raises(FormatError, match=rf"packages\.torch: saved 2\.0\.0, now {now}; undo the change"):
        run(folder, settings_for(data), resume=True)


def test_a_change_that_is_allowed_is_noted_in_the_run_for_good(copied: tuple[Path, Path], straight: Path):
    folder, data = copied
    changed = settings_for(data, lr=0.02)
    notes = run(folder, changed, resume=True, allow_change=True, stop_at=6).notes
    assert notes == ["not bit-exact any more: settings.lr: saved 0.01, now 0.02"]
    run(folder, changed, resume=True)
    assert "after step 5: settings.lr: saved 0.01, now 0.02" in (folder / "run.json").read_text()
    assert not compare_runs(straight, folder).equal
