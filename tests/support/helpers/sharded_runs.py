"""What tests of snapshots run on every rank of a mesh: states of which each has parts, and ranks that go wrong."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llorch.pytorch.distributed.dtensor import gather_all, whole
from llorch.pytorch.distributed.launch import TIMEOUT, start
from llorch.pytorch.train.plan import plan_training
from llorch.pytorch.train.sharded_snapshots import ShardedSaver
from llorch.pytorch.train.trainer import Training
from llorch.training import snapshots
from llorch.training.settings import TrainSettings
from llorch.training.snapshot_files import PARTS
from llorch.training.snapshots import SnapshotStore

SHAPES = {  # shape, dtype, axis that the ranks of tp split, whether those of dp split the first: None for no DTensor
    "adapter/q.lora_A": ((3, 96), torch.float32, None, True),
    "adapter/q.lora_B": ((14, 3), torch.float64, 0, True),
    "adapter/o.lora_A": ((3, 10), torch.float32, 1, True),
    "adapter/norm": ((5,), torch.float32, None, False),
    "optimizer/k.lora_B": ((2, 3), torch.float64, 0, True),
    "optimizer/codes": ((5, 7), torch.uint8, 1, True),
    "optimizer/counts": ((2,), torch.int64, None, True),
    "optimizer/step": ((), torch.int64, None, None),
    "optimizer/bytes": ((9,), torch.uint8, None, None),
    "none": ((0, 3), torch.float32, None, None),
}


def whole_state(step: int) -> dict[str, Tensor]:
    """What a snapshot of the step holds."""
    generator = torch.Generator().manual_seed(step)
    state = {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).abs().to(dtype)
        for name, (shape, dtype, _, _) in SHAPES.items()
    }
    state["adapter/norm"][:2] = torch.tensor([float("nan"), -0.0])
    return state


def state_of_rank(step: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The parts of this rank."""
    return {
        name: _dealt(whole, mesh, SHAPES[name][2], split=SHAPES[name][3]) for name, whole in whole_state(step).items()
    }


def joined_together(axes: Mapping[str, int]) -> list[str]:
    """Join the tensors of each dtype together; return the names of those that differ from what was dealt."""
    torch.set_num_threads(1)
    mesh, wrong = start(axes), list[str]()
    parts, expected = state_of_rank(20, mesh), whole_state(20)
    for dtype in dict.fromkeys(tensor.dtype for tensor in parts.values()):  # in one order on all ranks
        alike = {name: tensor.detach() for name, tensor in parts.items() if tensor.dtype == dtype}
        for name, tensor in gather_all(alike).items():
            right = tensor.shape == expected[name].shape and tensor.is_contiguous()
            if not right or tensor.numpy().tobytes() != expected[name].numpy().tobytes():
                wrong.append(name)
    dist.destroy_process_group()
    return wrong


def _dealt(full_tensor: Tensor, mesh: DeviceMesh, tp_axis: int | None, *, split: bool | None) -> Tensor:
    """As the model is split: first by tp, and what a rank has then by dp."""
    if split is None:
        return full_tensor
    part, dp, tp = full_tensor, Replicate(), Replicate()
    if tp_axis is not None:
        part, tp = _part(part, tp_axis, mesh["tp"]), Shard(tp_axis)
    if split:
        part = _part(part, 0, mesh["dp"])
        dp = _StridedShard(0, split_factor=mesh["tp"].size()) if tp_axis == 0 else Shard(0)
    made = DTensor.from_local(
        part.clone(), mesh, (dp, tp), run_check=False, shape=full_tensor.shape, stride=full_tensor.stride()
    )
    return torch.nn.Parameter(made, requires_grad=full_tensor.is_floating_point())


def _part(full_tensor: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
    parts, rank = full_tensor.chunk(mesh.size(), axis), mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else full_tensor.narrow(axis, 0, 0)


def save_alone(store: SnapshotStore, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """As several processes save, by one that is alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(dict(tensors), checkpoint_id=store.begin(step) / PARTS, no_dist=True)
    return store.complete(step, record)


@torch.no_grad()
def scramble(state: Mapping[str, Tensor]) -> None:
    """As the next step does."""
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7)


@contextmanager
def saving(
    folder: Path, axes: Mapping[str, int], *, timeout: timedelta = TIMEOUT
) -> Iterator[tuple[ShardedSaver, SnapshotStore, DeviceMesh]]:
    torch.set_num_threads(1)
    mesh = start(axes)
    store = SnapshotStore(folder)
    with store.lock() if dist.get_rank() == 0 else nullcontext():
        yield ShardedSaver(store, timeout=timeout), store, mesh
    dist.destroy_process_group()


def save_two(folder: Path, axes: Mapping[str, int]) -> float:
    """Save steps 20 and 40 while going on; returns the seconds of the second, which `poll` puts in its place."""
    scrambled = threading.Event()
    with saving(folder, axes) as (saver, store, mesh):
        on_rank(dist.get_rank(), _after(scrambled), filesystem.FileSystem, "create_stream")
        begin = 0.0
        for step in (20, 40):
            saver.wait()
            scrambled.clear()
            state, record = state_of_rank(step, mesh), {"step": step, "changes": []}
            begin = time.perf_counter()
            saver.save(step, state, record)
            scramble(state)
            record["changes"].append("later")
            scrambled.set()
        if dist.get_rank() == 0:
            while store.steps() != [20, 40]:  # the other ranks are not asked
                saver.poll()
        seconds = time.perf_counter() - begin
        saver.wait()
        saver.wait()  # there is nothing to wait for
        return seconds


def on_rank(rank: int, make: Callable[[Callable[..., Any]], Callable[..., Any]], owner: Any, name: str) -> None:
    """Replace a function on one rank."""
    if dist.get_rank() == rank:
        setattr(owner, name, make(getattr(owner, name)))


def save_training(folder: Path, settings: TrainSettings) -> dict[str, bytes]:
    """Save a step of a training on 2 x 2 ranks while the next one is made; returns what was to be saved, whole."""
    with saving(folder, {"dp": 2, "tp": 2}) as (saver, _, mesh):
        training = Training(plan_training(settings, mesh))
        training.run_step()
        tensors = training.tensors()
        complete = {name: whole(tensor).numpy().tobytes() for name, tensor in tensors.items()}
        saver.save(training.step, tensors, {"step": training.step})
        training.run_step()
        saver.wait()
        return complete


def _after(event: threading.Event) -> Callable[..., Any]:
    """Writing begins after the event, so that it is no accident what is written."""

    def waiting(create_stream: Callable[..., Any]) -> Callable[..., Any]:
        def create_after(*args: Any) -> Any:
            assert event.wait(60)
            return create_stream(*args)

        return create_after

    return waiting


@contextmanager
def _full(self: object, path: object, mode: str) -> Iterator[Any]:
    with open("/dev/full", mode) as stream:
        yield stream


def _dying(self: object, path: Path, mode: str) -> None:
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def _no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


def save_and_fail(folder: Path) -> list[tuple[str, list[str], list[int]]]:
    """Errors of all ranks, what is left behind and the steps there are: one rank, rank 0 alone, and no folder."""
    with saving(folder, {"dp": 2, "tp": 1}) as (saver, store, mesh):
        saver.save(10, state_of_rank(10, mesh), {})
        saver.save(20, state_of_rank(20, mesh), {})  # which finishes the one before
        saver.wait()
        stream, write = filesystem.FileSystem.create_stream, snapshots.write_file
        on_rank(1, lambda _: _full, filesystem.FileSystem, "create_stream")
        seen = [_failure(lambda: _saved(saver, 40, mesh), store)]
        filesystem.FileSystem.create_stream = stream
        on_rank(0, lambda _: _no_space, snapshots, "write_file")
        seen.append(_failure(lambda: _saved(saver, 40, mesh), store))
        snapshots.write_file = write
        saver.save(40, state_of_rank(40, mesh), {})
        saver.wait()
        seen.append(_failure(lambda: _saved(saver, 60, mesh, remove=folder), store))
        return seen


def _saved(saver: ShardedSaver, step: int, mesh: DeviceMesh, *, remove: Path | None = None) -> None:
    if remove and dist.get_rank() == 0:
        remove.rename(remove.with_name("elsewhere"))
    saver.save(step, state_of_rank(step, mesh), {})
    for _ in range(50):
        saver.poll()  # which keeps what went wrong to itself
        time.sleep(0.01)
    saver.wait()


def _failure(work: Callable[[], None], store: SnapshotStore) -> Any:
    """What each rank says."""
    try:
        work()
        said = "nothing"
    except OSError as error:
        said = f"{type(error).__name__} {error.errno} {error.strerror}"
    all_said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_said, said)
    left = [path.name for path in store.folder.rglob(".*")]
    return all_said, left, store.steps()


def save_and_die(folder: Path, rank: int) -> None:
    """Save step 20; one rank is killed while it writes step 40."""
    with saving(folder, {"dp": 2, "tp": 1}) as (saver, _, mesh):
        saver.save(20, state_of_rank(20, mesh), {})
        saver.wait()
        on_rank(rank, lambda _: _dying, filesystem.FileSystem, "create_stream")
        try:
            saver.save(40, state_of_rank(40, mesh), {})
            saver.wait()
        except RuntimeError:  # the other rank is lost; the launcher must see that before this rank ends, too
            time.sleep(60)
            raise


def save_without_a_part(folder: Path, checked: bool) -> str:
    """Rank 1 leaves out a part of what it has; with or without torch looking. Returns what rank 0 says."""

    def without(plan: Callable[..., SavePlan]) -> Callable[..., SavePlan]:
        def planned(*args: Any) -> SavePlan:
            found = plan(*args)
            return SavePlan([item for item in found.items if item.index.fqn != "adapter/q.lora_A"])

        return planned

    with saving(folder, {"dp": 2, "tp": 1}) as (saver, store, mesh):
        on_rank(1, without, default_planner, "create_default_local_save_plan")
        if not checked:
            on_rank(0, lambda _: lambda *args: [], default_planner, "_validate_global_plan")
        said, *_ = _failure(lambda: _saved(saver, 20, mesh), store)
        assert said[0] == said[1]
        return said[0]


def save_without_a_rank(folder: Path) -> str:
    """Let only rank 0 save; returns its error."""
    with saving(folder, {"dp": 2, "tp": 1}, timeout=timedelta(seconds=2)) as (saver, _, mesh):
        said = "nothing"
        if dist.get_rank() == 0:
            try:
                saver.save(20, state_of_rank(20, mesh), {})
                saver.wait()
            except (RuntimeError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
        dist.barrier()
        return said
