"""The files of a snapshot whose tensors several processes wrote: each is under a digest, and none may be added."""

import os
from pathlib import Path

import pytest
from fakes.faulty_disk import leftovers, read_parts, save_parts, tensors_of
from helpers.refusals import refuses

from llorch.runtime.errors import FormatError
from llorch.training.snapshot_files import PARTS, RECORD, read_snapshot
from llorch.training.snapshots import SnapshotStore


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
