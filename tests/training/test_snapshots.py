"""Snapshots on disk: what is kept and found, who may write, damage that is noticed, files of several processes."""

import errno
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fakes.faulty_disk import Fault, FaultyDisk, leftovers, on, read_parts, save, save_parts, tensors_of
from helpers.command_line import REPOSITORY
from helpers.refusals import assert_tells, refuses

from benchmarks.snapshot_damage import count_detected
from llorch.runtime.errors import FormatError
from llorch.training.snapshot_files import PARTS, RECORD, TENSORS, read_snapshot
from llorch.training.snapshots import SnapshotStore
from tests.files.test_convert_failures import without_privileges


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path)


def flip(path: Path, index: int) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def test_what_was_saved_comes_back_bit_by_bit_and_can_be_written_to(store: SnapshotStore):
    odd = {"nan": np.array([np.nan, -0.0, 1e-45], np.float32), "none": np.zeros((0, 3)), "half": np.ones(3, np.float16)}
    store.save(7, tensors_of(7) | odd, {"loss": 0.1 + 0.2, "list": [None, True, "ä\n"]})
    found = store.newest()
    assert found is not None
    assert (found.step, found.record) == (7, {"loss": 0.1 + 0.2, "list": [None, True, "ä\n"]})
    assert found.path == store.folder / "snapshots" / "step-00000007"
    for name, array in (tensors_of(7) | odd).items():
        assert found.tensors[name].tobytes() == array.tobytes()
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (array.dtype, array.shape)
        assert found.tensors[name].flags.writeable


def test_other_readers_of_safetensors_read_a_snapshot(store: SnapshotStore):
    from safetensors.numpy import load_file

    for name, array in load_file(store.save(7, tensors_of(7), {}) / TENSORS).items():
        np.testing.assert_array_equal(array, tensors_of(7)[name], strict=True)


def test_equal_states_give_equal_files(tmp_path: Path):
    made = [SnapshotStore(tmp_path / name).save for name in "ab"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = made[0](3, tensors_of(3), {"x": 1})
    second = made[1](3, dict(reversed(tensors_of(3).items())), {"x": 1})
    for name in (RECORD, TENSORS):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_last_few_are_kept_and_none_after_the_step_that_a_run_was_taken_up_before(tmp_path: Path):
    store = SnapshotStore(tmp_path, keep=3)
    assert store.newest() is None
    for step in (10, 20, 15):
        save(store, step)
    assert store.steps() == [10, 15]
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(store, step)
    assert store.steps() == [99_999_999, 100_000_000, 100_000_001]
    with refuses(ValueError, "keep", 1, got=0):
        SnapshotStore(tmp_path, keep=0)


def test_save_of_unsupported_values_is_refused_and_writes_no_file(store: SnapshotStore):
    with refuses(ValueError, "x", "complex128", expected="F64"):
        store.save(1, {"x": np.zeros(2, complex)}, {})
    with refuses(ValueError, "JSON"):
        store.save(1, tensors_of(1), {"loss": float("nan")})
    assert leftovers(store.folder) == []
    assert store.steps() == []


@pytest.mark.parametrize("name", [RECORD, TENSORS])
def test_a_snapshot_that_is_damaged_or_lacks_a_file_is_passed_over_with_the_reason(name: str, store: SnapshotStore):
    for step in (10, 20, 30):
        save(store, step)
    store = SnapshotStore(store.folder, keep=3)
    save(store, 40)
    flip(store.snapshots / "step-00000040" / name, -20)
    (store.snapshots / "step-00000030" / name).unlink()
    found = store.newest()
    assert found is not None
    assert found.step == 20
    assert_tells(found.skipped[0], "Inconsistent", "sha256", where=store.snapshots / "step-00000040" / name)
    assert_tells(found.skipped[1], "Missing", name, where=store.snapshots / "step-00000030")


def test_when_no_snapshot_can_be_used_each_reason_is_told(store: SnapshotStore):
    for step in (10, 20):
        save(store, step)
        flip(store.snapshots / f"step-000000{step}" / TENSORS, -1)
    with refuses("Inconsistent", "step-00000020", "step-00000010", where=store.snapshots) as caught:
        store.newest()
    assert str(caught.value).count("sha256") == 2


def test_a_snapshot_of_another_format_is_refused(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.training.snapshot_files.FORMAT", 2)
    path = store.save(1, tensors_of(1), {})
    monkeypatch.undo()
    with refuses("Unsupported", "version", expected=1, got="sha256", where=path / RECORD):
        read_snapshot(path)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path):
    assert count_detected(tmp_path, flips=100, cuts=20, seed=0) == {"flips": 100, "cuts": 20}


def test_a_second_run_in_the_folder_is_refused_and_a_third_after_it_is_not(store: SnapshotStore):
    code = "import sys; from pathlib import Path; from llorch.training.snapshots import SnapshotStore\n"
    code += "from llorch.cli.outcome import reported\nwith reported(), SnapshotStore(Path(sys.argv[1])).lock(): pass"
    command = [sys.executable, "-c", code, str(store.folder)]
    with store.lock():
        second = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert second.returncode != 0
    assert_tells(second.stderr.splitlines()[0], "llorch:", "another", where=store.folder)
    with store.lock() as without:
        assert without is None


def test_where_there_is_no_flock_a_run_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    anew = runpy.run_path(str(REPOSITORY / "llorch" / "training" / "snapshots.py"))  # it can be imported without, too
    with anew["SnapshotStore"](tmp_path / "run").lock() as without:
        assert_tells(without, "flock")


def test_locking_makes_the_folder_and_removes_what_a_killed_run_left(tmp_path: Path):
    store = SnapshotStore(tmp_path / "runs" / "mine")
    with store.lock():
        save(store, 10)
    for name in (".new-step-00000020", ".gone-step-00000005", ".old-step-00000010"):
        (store.snapshots / name).mkdir()
        (store.snapshots / name / TENSORS).write_bytes(b"half")
    (store.folder / ".run.json.1234.tmp").write_bytes(b"half")
    (store.folder / ".mine").touch()  # not ours
    with store.lock():
        assert leftovers(store.folder) == [".mine"]
        assert store.steps() == [10]


def test_a_snapshot_that_had_made_room_comes_back_when_the_new_one_did_not_arrive(store: SnapshotStore):
    save(store, 10)
    (store.snapshots / "step-00000010").rename(store.snapshots / ".old-step-00000010")
    with store.lock():
        found = store.newest()
    assert found is not None
    assert found.step == 10


def test_save_out_of_memory_removes_partial_files(store: SnapshotStore):
    save(store, 10)
    for at in range(1, 9):
        with on(FaultyDisk(Fault("memory", MemoryError()), at)), pytest.raises(MemoryError):
            save(store, 20)
        assert leftovers(store.folder) == []
    assert store.steps() == [10]


def test_a_read_only_folder_is_one_line():
    with without_privileges(), tempfile.TemporaryDirectory() as folder:
        store = SnapshotStore(Path(folder))
        save(store, 10)
        store.snapshots.chmod(0o500)
        with refuses(PermissionError, 20, os.strerror(errno.EACCES), 10, where=store.snapshots):
            save(store, 20)
        store.snapshots.chmod(0o700)
        assert store.steps() == [10]
        assert leftovers(store.folder) == []


def test_a_folder_that_vanished_is_not_made_again(tmp_path: Path):
    store = SnapshotStore(tmp_path / "run")
    with store.lock():
        (tmp_path / "run").rmdir()
        with refuses(FileNotFoundError, 10, where=store.snapshots):
            save(store, 10)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["with space", "ünï", "-o", "a\nb", "%s{}", "step-00000010", "x" * 200, "\udce9"])
def test_folders_of_odd_names_work(name: str, tmp_path: Path):
    store = SnapshotStore(tmp_path / name)
    with store.lock():
        save(store, 10)
        flip(store.save(20, tensors_of(20), {}) / TENSORS, -1)
        found = store.newest()
    assert found is not None
    assert found.step == 10
    assert found.skipped[0].isprintable()


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    save_parts(SnapshotStore(tmp_path), 10)
    return tmp_path / "snapshots" / "step-00000010"


def test_what_was_saved_is_read_by_whom_is_given(snapshot: Path):
    found = read_snapshot(snapshot, read_parts)
    assert (found.step, found.record, found.path) == (10, {"step": 10, "text": "ä"}, snapshot)
    assert {name: array.tolist() for name, array in found.tensors.items()} == {
        name: array.tolist() for name, array in tensors_of(10).items()
    }
    assert sorted(os.listdir(snapshot)) == [RECORD, PARTS]


def test_without_anybody_to_read_them_that_is_said(snapshot: Path):
    with refuses("Unsupported", "torch", where=snapshot / PARTS):
        read_snapshot(snapshot)


def test_every_flipped_byte_of_every_file_is_noticed(snapshot: Path):
    for file in [snapshot / RECORD, *(snapshot / PARTS).iterdir()]:
        sound = file.read_bytes()
        for at in range(0, len(sound), 7):
            file.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
            with pytest.raises(FormatError) as caught:
                read_snapshot(snapshot, read_parts)
            assert caught.value.code in ("Inconsistent", "Malformed")
            assert str(caught.value.path).endswith(file.name)
        file.write_bytes(sound)
    read_snapshot(snapshot, read_parts)


def test_a_missing_and_an_additional_file_are_named(snapshot: Path):
    (snapshot / PARTS / "more").touch()
    with refuses("Unexpected", "more", where=snapshot / PARTS):
        read_snapshot(snapshot, read_parts)
    (snapshot / PARTS / "more").unlink()
    (snapshot / PARTS / "optimizer|step.npy").unlink()
    with refuses("Missing", "tensors/optimizer|step.npy", where=snapshot):
        read_snapshot(snapshot, read_parts)


def test_what_was_begun_can_be_abandoned_and_is_cleared_when_a_run_begins(tmp_path: Path):
    store = SnapshotStore(tmp_path)
    save_parts(store, 10)
    for end in (lambda: store.abandon(20), store.clear):
        new = store.begin(20)
        (new / PARTS).mkdir()
        (new / PARTS / "half").touch()
        assert leftovers(tmp_path) == [".new-step-00000020"]
        end()
        assert leftovers(tmp_path) == []
    assert store.steps() == [10]


def test_nothing_stays_of_what_cannot_be_completed(tmp_path: Path):
    store = SnapshotStore(tmp_path)
    store.begin(20)  # and no rank wrote anything
    with refuses(FileNotFoundError, 20, "none", where=store.snapshots):
        store.complete(20, {})
    assert leftovers(tmp_path) == []
