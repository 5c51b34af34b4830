"""Saves that fail: whatever goes wrong at whatever operation, the snapshot before or the new one loads, never a mix."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.faulty_disk import (
    FAULTS,
    Crash,
    FastDisk,
    Fault,
    FaultyDisk,
    StutteringDisk,
    VolatileDisk,
    leftovers,
    on,
    put_down,
    read_parts,
    save,
    save_parts,
    tensors_of,
)  # fmt: skip
from helpers.refusals import refuses

from llorch.training.snapshot_files import Snapshot, read_snapshot
from llorch.training.snapshots import SnapshotStore, step_name

SITUATIONS = {  # steps saved before, the step whose save fails, snapshots kept
    "first": ((), 10, 2),
    "third": ((10, 20), 30, 2),
    "only one kept": ((10,), 20, 1),
    "same step again": ((10, 20), 20, 2),
    "taken up before the last": ((10, 20), 15, 2),
}


@pytest.fixture(autouse=True)
def fast_disk() -> Iterator[None]:
    with on(FastDisk()):
        yield


def assert_holds(snapshot: Snapshot | None, steps: set[int]) -> None:
    """One of these steps, and exactly the state that was saved; 0 stands for none."""
    assert (snapshot.step if snapshot else 0) in steps
    if snapshot:
        assert snapshot.skipped == ()
        assert snapshot.record == {"step": snapshot.step, "text": "ä"}
        assert snapshot.tensors.keys() == tensors_of(snapshot.step).keys()
        for name, array in tensors_of(snapshot.step).items():
            np.testing.assert_array_equal(snapshot.tensors[name], array, strict=True)


class ListingDisk(FaultyDisk):
    """Fails at nothing, and lists the operations in order."""

    def __init__(self) -> None:
        super().__init__(FAULTS[0], fail_index=10**6)
        self.operations: list[str] = []

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.operations.append(name)
            return operation(*args)

        return run


def operations_of(folder: Path, situation: str, save: Callable[[SnapshotStore, int], None]) -> list[str]:
    """List the operations of a save that succeeds."""
    before, step, keep = SITUATIONS[situation]
    store, disk = SnapshotStore(folder, keep=keep), ListingDisk()
    for earlier in before:
        save(store, earlier)
    with on(disk):
        save(store, step)
    return disk.operations


def fail_at(
    fail_index: int, fault: Fault, folder: Path, situation: str, save: Callable[[SnapshotStore, int], None]
) -> None:
    """Save with a fault at one operation, look at what is left, save again."""
    before, step, keep = SITUATIONS[situation]
    store, disk = SnapshotStore(folder, keep=keep), FaultyDisk(fault, fail_index)
    for earlier in before:
        save(store, earlier)
    old_or_new = {before[-1] if before else 0, step}
    try:
        with on(disk):
            save(store, step)
    except OSError:  # the run may go on, and what was wrong may be right again
        if not fault.sticky:
            assert_holds(store.newest(read_parts), old_or_new)
        save(store, step)
        old_or_new = {step}
    except Crash:
        pass  # and another process starts
    assert disk.failed
    with store.lock():
        assert leftovers(folder) == []
        assert_holds(store.newest(read_parts), old_or_new)
        save(store, 40)
        assert_holds(store.newest(read_parts), {40})


@pytest.mark.nightly_cases(but=["first-save", "third-save"])
@pytest.mark.parametrize("save", [save, pytest.param(save_parts, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_old_or_the_new_snapshot_loads_whichever_operation_of_a_save_fails(
    situation: str, save: Callable[[SnapshotStore, int], None], tmp_path: Path
):
    operations = operations_of(tmp_path, situation, save)
    assert len(operations) >= 20
    assert "write" in operations
    for fault in FAULTS:
        for at, operation in enumerate(operations, 1):
            if fault.half and operation != "write":  # then it is the fault without `half`
                continue
            folder = tmp_path / f"operation {at}, {fault.name}"
            folder.mkdir()
            fail_at(at, fault, folder, situation, save)
            shutil.rmtree(folder)


def open_below(folder: Path) -> list[Path]:
    """List what this process has open: a folder, or files below it, also removed ones."""
    opened = [Path(f"/proc/self/fd/{number}").resolve() for number in os.listdir("/proc/self/fd")]
    return [path for path in opened if path.is_relative_to(folder.resolve())]


def test_failed_save_removes_its_files_if_removing_works(tmp_path: Path):
    for at in range(1, 12):
        folder = tmp_path / str(at)
        folder.mkdir()
        with on(FaultyDisk(FAULTS[0], at)), refuses(OSError, 10, "injected", "none", where=folder):
            save(SnapshotStore(folder), 10)
        assert leftovers(folder) == []
        assert open_below(folder) == []


def test_files_that_stay_open_are_found(tmp_path: Path):
    with (tmp_path / "a").open("w"):
        (tmp_path / "a").unlink()
        assert len(open_below(tmp_path)) == 1
    assert open_below(tmp_path) == []


def test_writes_that_are_cut_short_are_gone_on_with(tmp_path: Path):
    store = SnapshotStore(tmp_path)
    with on(StutteringDisk()):
        save(store, 10)
    assert_holds(store.newest(), {10})


def test_power_loss_keeps_the_last_or_the_current_snapshot(tmp_path: Path):
    root = tmp_path / "run"
    looked_at: set[frozenset] = set()
    saved = [0]

    def pull_the_plug() -> None:
        for tree in disk.after_power_loss():
            state = frozenset([*tree.items(), ("saved", saved[-1])])
            if state not in looked_at:
                looked_at.add(state)
                with on(FastDisk()):
                    assert_survives(tree, tmp_path / str(len(looked_at)), saved[-1], saving)

    disk = VolatileDisk(root, pull_the_plug)
    store = SnapshotStore(root, keep=2)
    for saving in (10, 20, 20, 30):
        with on(disk):
            save(store, saving)
        saved.append(saving)
        pull_the_plug()
    print(f"{len(looked_at)} states of the disk")
    assert len(looked_at) > 50


def assert_survives(tree: dict[str, bytes | None], folder: Path, saved: int, saving: int) -> None:
    put_down(tree, folder)
    store = SnapshotStore(folder)
    with store.lock():
        assert_holds(store.newest(), {saved, saving})
        for step in store.steps():
            read_snapshot(store.snapshots / step_name(step))
        assert leftovers(folder) == []
    shutil.rmtree(folder)
