"""Snapshots of several processes: read whole by one, bit by bit; complete or absent whatever happens to a rank."""

import os
import re
from pathlib import Path

import pytest
from fakes.faulty_disk import leftovers
from helpers.refusals import assert_tells, refuses
from helpers.sharded_runs import (
    save_and_die,
    save_and_fail,
    save_training,
    save_two,
    save_without_a_part,
    save_without_a_rank,
    whole_state,
)  # fmt: skip
from helpers.training_runs import small_settings

from llorch.pytorch.distributed.launch import on_ranks
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.snapshot_parts import read_parts
from llorch.pytorch.train.trainer import Training
from llorch.runtime.errors import EngineDied
from llorch.training.snapshot_files import PARTS, Snapshot
from llorch.training.snapshots import SnapshotStore

pytestmark = pytest.mark.usefixtures("warm_ranks")


def assert_holds(snapshot: Snapshot | None, step: int) -> None:
    assert snapshot is not None
    assert snapshot.step == step
    whole = whole_state(step)
    assert snapshot.tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        array = snapshot.tensors[name]
        assert (array.dtype, array.shape) == (tensor.numpy().dtype, tuple(tensor.shape)), name
        assert array.tobytes() == tensor.numpy().tobytes(), name
        assert array.flags.writeable


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2},
        pytest.param({"dp": 4, "tp": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_snapshot_of_a_mesh_reads_completely_and_is_not_changed_by_later_steps(axes: dict[str, int], tmp_path: Path):
    seconds = on_ranks(axes["dp"] * axes["tp"], save_two, tmp_path, axes)
    print(f"saved in {seconds:.2f} s")
    store = SnapshotStore(tmp_path)
    assert leftovers(tmp_path) == [".metadata", ".metadata"]
    found = store.newest(read_parts)
    assert_holds(found, 40)
    assert found is not None
    assert found.record == {"step": 40, "changes": []}
    assert {file.name for file in (found.path / PARTS).iterdir()} >= {".metadata", "__0_0.distcp", "__1_0.distcp"}
    (found.path / PARTS / "__1_0.distcp").unlink()
    before = store.newest(read_parts)
    assert_holds(before, 20)
    assert before is not None
    (skipped,) = before.skipped
    assert_tells(skipped, found.path, "Missing", "tensors/__1_0.distcp")


@pytest.mark.slow
def test_snapshot_of_a_mesh_loads_in_one_process(tmp_path: Path):
    settings = small_settings(tmp_path, model="micro-llama")
    saved = on_ranks(4, save_training, tmp_path / "run", settings)
    found = SnapshotStore(tmp_path / "run").newest(read_parts)
    assert found is not None
    assert {name: array.tobytes() for name, array in found.tensors.items()} == saved
    training = Training(plan_training(settings))
    training.load(found.tensors, found.record)
    loaded = training.state()[0]
    assert {name: loaded[name].tobytes() for name in saved} == saved


def test_write_failure_on_one_rank_is_reported_by_all_and_writes_no_files(tmp_path: Path):
    full, unplaced, gone = on_ranks(2, save_and_fail, tmp_path / "run")
    for said, *left in (full, unplaced):
        assert said[0] == said[1]
        assert_tells(said[0], "OSError 28", "step 40", "No space left", "step 20")
        assert left == [[".metadata", ".metadata"], [10, 20]]
    assert ["rank 1" in said[0] for said, *_ in (full, unplaced, gone)] == [True, False, False]
    assert gone == ([gone[0][0]] * 2, [], [])
    assert_tells(gone[0][0], "FileNotFoundError 2", "step 60", "No such file")
    assert_holds(SnapshotStore(tmp_path / "elsewhere").newest(read_parts), 40)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_while_writing_keeps_the_previous_snapshot(rank: int, tmp_path: Path):
    with refuses(EngineDied, f"rank {rank} of 2", "Signal 9"):
        on_ranks(2, save_and_die, tmp_path, rank)
    store = SnapshotStore(tmp_path)
    assert_holds(store.newest(read_parts), 20)
    assert rank or ".new-step-00000040" in leftovers(tmp_path)  # else rank 0 may still have cleared it
    with store.lock():
        assert leftovers(tmp_path) == [".metadata"]
        assert_holds(store.newest(read_parts), 20)


def test_rank_that_omits_its_shard_is_reported_on_save(tmp_path: Path):
    said = on_ranks(2, save_without_a_part, tmp_path, True)
    assert_tells(said, "OSError 5", "step 20", "rank 0", "ValueError", "key:adapter/q.lora_A")
    assert os.listdir(tmp_path / "snapshots") == []


@pytest.mark.slow
def test_omitted_shard_is_reported_on_read(tmp_path: Path):
    assert on_ranks(2, save_without_a_part, tmp_path, False) == "nothing"
    with refuses("Inconsistent", "96 of 288", where="adapter/q.lora_A"):
        SnapshotStore(tmp_path).newest(read_parts)


def test_waiting_ranks_time_out(tmp_path: Path):
    assert re.match(r"(RuntimeError|DistBackendError): .*[Tt]imed out", on_ranks(2, save_without_a_rank, tmp_path))
