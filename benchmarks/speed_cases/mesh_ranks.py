"""Work of the ranks of a mesh for case `mesh`: steps of a model with random weights, and their costs.

Every rank makes the full model and keeps its shard, so that no file is needed.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from llorch.lora.adapter import Adapter, LoraTensors, checked
from llorch.lora.config import LoraConfig
from llorch.pytorch.device import Target, target
from llorch.pytorch.distributed.dtensor import own
from llorch.pytorch.distributed.launch import leave, start
from llorch.pytorch.distributed.sharding_plan import cut_for
from llorch.pytorch.lora.adapters import attach, trainable_parameters
from llorch.pytorch.random_weights import random_model
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients
from llorch.pytorch.train.loading import prepare
from llorch.pytorch.train.step import Alone, OnMesh, Stepper
from llorch.training.batch import Batch

from .mesh_model import Job

KINDS = {  # operation of torch -> kind; bytes are the larger of input and output
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "_allgather_base_": "all-gather",
    "allgather_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
}  # fmt: skip
SILENT = {"_wrap_tensor_autograd", "wait_tensor"}  # operations of these namespaces that send nothing


@dataclass(frozen=True)
class Cost:
    """Costs that a rank measured."""

    kept: dict[str, int]  # exact bytes of weights, adapters and moments
    held: int  # largest bytes of tensors alive at the same time in a step
    peak: int  # peak bytes of the process (on a GPU: of torch), less those before the model was made
    seconds: list[float]  # of every step
    cpu: list[float]  # processor time of every step, busy waiting included
    messages: dict[tuple[str, str, int], int]  # axis, kind, bytes -> number per step
    losses: list[float]


def measured(job: Job, device: str, steps: int, weighed: bool) -> list[Cost]:
    """Train some steps on every rank, each with one thread; return all ranks' costs in order. `weighed` is slow."""
    torch.set_num_threads(1)
    mesh = start({"dp": job.dp, "tp": job.tp}, device=device)
    start_bytes = _used_bytes(device)
    stepper = make_stepper(job, target(device, {2: "bfloat16", 4: "float32"}[job.width]), mesh)
    batches = [_rows(job, seed) for seed in range(job.passes)]
    alive = _AliveBytes()
    with counting(mesh) as counts, alive if weighed else nullcontext():
        losses = [stepper.step(batches, 1e-4)[0]]
    _reset_peak(device)
    seconds, cpu = [], []
    for _ in range(steps):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        losses.append(stepper.step(batches, 1e-4)[0])
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    cost = Cost(
        _kept_bytes(stepper), alive.largest, _peak_bytes(device) - start_bytes, seconds, cpu, dict(counts), losses
    )
    costs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(costs, cost)
    leave()
    return costs


def make_stepper(job: Job, device_target: Target, mesh: DeviceMesh) -> Stepper:
    """Make the model, the adapter and the optimizer that train this rank's part."""
    module = random_model(job.config, device_target)
    shard = cut_for(job.config, mesh)
    for name, parameter in module.named_parameters():
        parameter.data = shard(name, parameter.data)
    prepare(module, device_target)
    attach(module, _adapter(job), trainable=True)
    if job.recomputed:
        checkpoint_gradients(module)
    worker = OnMesh(module, mesh) if job.dp * job.tp > 1 else Alone(module)
    optimizer = AdamW(
        trainable_parameters(module), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, lr_ratio=1.0, eight_bit=False
    )
    return Stepper(worker, optimizer, device_target.device, label_smoothing=0.0, chunk=job.chunk, max_norm=1.0)


def _adapter(job: Job) -> Adapter:
    lora = LoraConfig(r=job.r, lora_alpha=2.0 * job.r, target_modules=job.modules)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return 0.01 * rng.standard_normal(shape, dtype=np.float32)

    targets = lora.targets(job.config).items()
    tensors = {name: LoraTensors(random(job.r, target.n_in), random(target.n_out, job.r)) for name, target in targets}
    return checked(lora, tensors, job.config)


def _rows(job: Job, seed: int) -> Batch:
    ids = np.random.default_rng(seed).integers(0, job.config.vocab_size, (job.rows, job.tokens))
    labels = ids.copy()
    labels[:, 0] = -100
    positions = np.tile(np.arange(job.tokens), (job.rows, 1))
    return Batch(ids, labels, positions, np.zeros_like(ids), np.arange(job.rows))


def _kept_bytes(stepper: Stepper) -> dict[str, int]:
    """Count the bytes of the storages that exist between steps."""
    trainable = stepper.optimizer.params
    frozen = [parameter for parameter in stepper.worker.module.parameters() if not parameter.requires_grad]
    moments = [own(moment) for name, moment in stepper.optimizer.state().items() if name != "step"]
    return {
        "weights": _storages([own(parameter.data) for parameter in frozen]),
        "adapters": _storages([own(parameter.data) for parameter in trainable.values()]),
        "moments": _storages(moments),
    }


def _storages(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@contextmanager
def counting(mesh: DeviceMesh) -> Iterator[Mapping[tuple[str, str, int], int]]:
    """Count the collectives that this process calls in the body, by axis, kind and bytes."""
    with _Counting({str(mesh[axis].get_group().group_name): axis for axis in ("dp", "tp")}) as mode:
        yield mode.counts


class _Counting(TorchDispatchMode):
    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes  # axis by name of its process group
        self.counts: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            size = max(sum(t.numel() * t.element_size() for t in _tensors(side)) for side in (*args, output))
            self.counts[self._axis(args), KINDS[name], size] += 1
        return output

    def _axis(self, args: Any) -> str:
        names = [argument if isinstance(argument, str) else _group_name(argument) for argument in args]
        return next(self._axes[name] for name in names if name is not None and name in self._axes)


class _AliveBytes(TorchDispatchMode):
    """Peak sum of the storages alive after an operation, over all tensors that operations used."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._alive: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, output)):
            storage = own(tensor).untyped_storage()
            self._alive[storage._cdata] = storage
        self.largest = max(self.largest, sum(storage.nbytes() for storage in self._alive.values()))
        return output


def _group_name(value: Any) -> str | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value).group_name
    except RuntimeError:  # an operation such as sum
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)


def _used_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else _read_status("VmRSS")


def _peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _read_status("VmHWM")


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
