"""Tensors that several processes wrote, read by one: all of each, or a reason; and a run goes on from them."""

import dataclasses
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.sharded_runs import save_alone, whole_state
from helpers.training_runs import Silent, small_settings
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from llorch.pytorch.train.run import Run
from llorch.pytorch.train.snapshot_parts import _Unpickler, read_parts
from llorch.pytorch.train.verify_resume import compare_runs
from llorch.training.snapshot_files import PARTS
from llorch.training.snapshots import SnapshotStore
from llorch.training.stopping import Stopped

NAME = "adapter/q.lora_A"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = whole_state(10) | {"half": torch.ones(3, 2, dtype=torch.float16), "small": torch.ones(1, dtype=torch.int32)}
    return save_alone(SnapshotStore(tmp_path), 10, state, {}) / PARTS


def test_tensors_of_each_dtype_are_read_as_they_were(folder: Path):
    found = read_parts(folder)
    assert found.keys() == {*whole_state(10), "half", "small"}
    for name, tensor in whole_state(10).items():
        assert found[name].tobytes() == tensor.numpy().tobytes()
        assert (found[name].dtype, found[name].shape) == (tensor.numpy().dtype, tuple(tensor.shape))
    assert found["half"].tolist() == [[1, 1]] * 3
    assert (found["half"].dtype, found["small"].dtype) == ("float16", "int32")


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the one part that is described of a tensor."""
    described: Any = FileSystemReader(folder).read_metadata()
    change(described.state_dict_metadata[NAME].chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(described))


@pytest.mark.parametrize(
    ("change", "n_wrong"),
    [
        (lambda chunks: chunks.clear(), 288),
        (lambda chunks: chunks.append(chunks[0]), 288),
        (lambda chunks: chunks.append(dataclasses.replace(chunks[0], sizes=torch.Size((1, 96)))), 96),
        (lambda chunks: chunks.append(dataclasses.replace(chunks.pop(), sizes=torch.Size((3, 95)))), 3),
        (lambda chunks: chunks.append(dataclasses.replace(chunks.pop(), offsets=torch.Size((2, 0)))), 192),
    ],
)
def test_tensor_with_inconsistent_shards_is_named(change: Callable, n_wrong: int, folder: Path):
    rewrite(folder, change)
    with refuses("Inconsistent", f"{n_wrong} of 288", where=NAME):
        read_parts(folder)


class MaliciousPickle:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


class PickledAttribute:
    """An object that is pickled as `getattr(kind, name)`, as enumerations are before Python 3.11.4."""

    def __init__(self, kind: object, name: str) -> None:
        self.said = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.said


def test_member_of_an_enumeration_pickled_by_an_older_python_is_read():
    kinds = metadata._MEM_FORMAT_ENCODING
    old = pickle.dumps(PickledAttribute(kinds, "TORCH_PRESERVE_FORMAT"))
    assert _Unpickler(io.BytesIO(old)).load() is kinds.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (MaliciousPickle(), "posix.mkdir"),
        ({"x": torch.bfloat16}, "torch.bfloat16"),
        (
            PickledAttribute(metadata.TensorProperties, "create_from_tensor"),
            "torch.distributed.checkpoint.metadata.TensorProperties",
        ),
    ],
)
def test_metadata_with_other_pickled_content_is_refused(
    value: object, asked: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    with refuses("Unsafe", asked, where=".metadata"):
        read_parts(folder)
    assert not (folder / "evil").exists()


@pytest.mark.parametrize(("name", "error"), [(".metadata", "UnpicklingError"), ("__0_0.distcp", "CheckpointException")])
def test_unreadable_shard_file_is_refused(name: str, error: str, folder: Path):
    (folder / name).write_bytes(b"of another version")
    with refuses("Unsupported", error, where=PARTS):
        read_parts(folder)


@pytest.mark.slow
def test_run_resumes_from_a_snapshot_of_several_processes(tmp_path: Path):
    settings = small_settings(tmp_path, dropout=0.2, save_every=2)
    Run(settings, tmp_path / "straight", Silent()).run()

    class Stopping(Silent):
        def made(self, report: Any) -> None:
            if report.step == 3:
                os.kill(os.getpid(), 15)

    with pytest.raises(Stopped):
        Run(settings, tmp_path / "stopped", Stopping()).run()
    for ours in ("stopped", "straight"):
        store = SnapshotStore(tmp_path / ours)
        found = store.newest()
        assert found is not None
        tensors = {name: torch.from_numpy(array) for name, array in found.tensors.items()}
        assert sorted(os.listdir(save_alone(store, found.step, tensors, found.record))) == ["snapshot.json", PARTS]
    Run(settings, tmp_path / "stopped", Silent(), resume=True).run()
    assert compare_runs(tmp_path / "straight", tmp_path / "stopped").equal
