"""Timing of the torch path, through the same steps that generation takes."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llorch.apps.bench.measure import COPY_BYTES, PRODUCT_WIDTH, Load, Subject, best_time, processor, prompts
from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES
from llorch.files import open_weights
from llorch.files.residency import Residency
from llorch.model.generate import Job
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.decoding import Decoding, compiled_forward
from llorch.pytorch.device import Target, compute_as_named
from llorch.pytorch.distributed.launch import named_on, summed
from llorch.pytorch.distributed.parallel_model import load_parallel, of_the_first
from llorch.pytorch.distributed.sharding_plan import of_a_rank
from llorch.pytorch.kernels.cpu.block import cpu_kernels
from llorch.pytorch.kernels.kernel_selection import built_kernels, speed_up
from llorch.pytorch.kernels.quantised_linear import PackedMatrix
from llorch.pytorch.kernels.table import faster
from llorch.pytorch.memory import CHUNK, free_memory
from llorch.pytorch.model import TorchModel, load_torch
from llorch.pytorch.random_weights import kind_named, random_bytes, random_model, weight_bytes
from llorch.pytorch.sampling import Needs


class TorchEngine:
    """See `llorch.apps.bench.measure.TimedEngine`."""

    def __init__(self, module: CausalLM, target: Target, load: Load, *, compiled: bool = False) -> None:
        """Reserve the cache for a module that has the kernels that are to be measured."""
        cuda = target.device.type == "cuda"
        self._target, self._load, config = target, load, self._cache_config(module.config)
        self._chunk = max(1, CHUNK[target.device.type] // load.batch)
        self._jobs = [
            Job(row, load.decode + 1, SamplingSettings(), frozenset())
            for row in prompts(load, config.vocab_size).tolist()
        ]
        cache = Cache(
            config, batch=load.batch, n_slots=load.prompt + load.decode, dtype=target.dtype, device=target.device
        )
        self._decoding = Decoding(module, cache, Needs.of([SamplingSettings()] * load.batch), n_end_ids=1)
        if compiled:
            self._decoding.forward = compiled_forward(module, growing=not cuda)
        if (graph := built_kernels(target).get("graph")) is not None:
            self._decoding.replay = graph(None)

    def _cache_config(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of the model whose keys and values the cache holds."""
        return config

    @property
    def tokens(self) -> Tensor:
        """Tokens that the last round wrote, a row per prompt."""
        return self._decoding.tokens[:, : self._load.decode + 1]

    @property
    def logprobs(self) -> Tensor:
        """Log probabilities of these tokens."""
        return self._decoding.logprobs[:, : self._load.decode + 1]

    def prefill(self) -> None:
        """See `Engine`."""
        self._decoding.begin(self._jobs, chunk=self._chunk)
        self._wait()

    def decode(self) -> None:
        """See `Engine`."""
        for _ in range(self._load.decode):
            self._decoding.advance()
        self._wait()

    def copy_rate(self) -> float:
        """See `Engine`."""
        n_bytes = COPY_BYTES[self._target.device.type]
        source = torch.ones(n_bytes, dtype=torch.uint8, device=self._target.device)
        copy = torch.empty_like(source)
        return 2 * n_bytes / best_time(lambda: (copy.copy_(source), self._wait()))

    def product_rate(self) -> float:
        """See `Engine`; on the CPU the better of torch's two libraries, of which llorch's kernels choose one."""
        width, at = PRODUCT_WIDTH[self._target.device.type], self._target
        matrix = torch.randn(width, width, device=at.device).to(at.dtype)
        modules: list[nn.Module] = [nn.Linear(width, width, bias=False, device=at.device, dtype=at.dtype)]
        if at.device.type == "cpu":
            modules.append(faster(modules[0], cpu_kernels(None, at.dtype)))
        return 2 * width**3 / min(best_time(lambda module=module: (module(matrix), self._wait())) for module in modules)

    def _wait(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)


class ParallelEngine(TorchEngine):
    """A rank of those that share every layer; ceilings are what all of them reach together."""

    def __init__(self, module: CausalLM, target: Target, load: Load, ranks: DeviceMesh) -> None:
        """Reserve the cache for the heads of this rank."""
        self._ranks = ranks
        super().__init__(module, target, load)
        self._decoding.agree = of_the_first(ranks)

    def _cache_config(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of the cache of one rank."""
        return of_a_rank(config, self._ranks.size())

    def copy_rate(self) -> float:
        """See `Engine`."""
        return self._together(super().copy_rate)

    def product_rate(self) -> float:
        """See `Engine`."""
        return self._together(super().product_rate)

    def _together(self, rate: Callable[[], float]) -> float:
        """Measure on all ranks at once, and return the sum of their rates."""
        dist.barrier(self._ranks.get_group())
        return float(summed(torch.tensor(rate()), self._ranks))


@dataclass(frozen=True)
class MeasuredModel:
    """A model to be measured, with its fast kernels in place."""

    module: CausalLM
    target: Target
    name: str  # of the file or shape
    weights: str  # how they are stored


def opened(path: Path, at: Target, residency: Residency, load: Load, *, compiled: bool) -> MeasuredModel:
    """Load a file or folder; see `load_torch`."""
    load.require(open_weights(path).config)
    n_tokens = load.batch * (load.prompt + load.decode)
    model = load_torch(
        path, device=str(at.device), dtype=at.dtype_name, kernels=at.kernels, residency=residency, compiled=compiled,
        n_tokens=n_tokens,
    )  # fmt: skip
    return _described(model)


def opened_on(mesh: DeviceMesh, path: Path, at: Target, residency: Residency, load: Load) -> MeasuredModel:
    """Load this rank's part of a file or folder; see `load_parallel`."""
    load.require(open_weights(path).config)
    n_tokens = load.batch * (load.prompt + load.decode)
    how: Any = {"dtype": at.dtype_name, "kernels": at.kernels, "residency": residency}
    return _described(load_parallel(path, mesh, n_tokens=n_tokens, **how))


def _described(model: TorchModel) -> MeasuredModel:
    packed = sorted({module.ggml_type.name for module in model.module.modules() if isinstance(module, PackedMatrix)})
    return MeasuredModel(model.module, model.target, model.name, "+".join(packed) or model.target.dtype_name)


def random(shape: str, at: Target, weights_type: str | None, load: Load, *, compiled: bool) -> MeasuredModel:
    """Make random weights of a shape, a key of `SHAPES`, on a device; `weights_type` names that of blocks."""
    config = SHAPES[shape]
    load.require(config)
    kind = None if weights_type is None else kind_named(weights_type)
    need, free = random_bytes(config, at, kind), free_memory(at.device)
    if need > free:
        raise MemoryError(
            f"bench: weights of {shape} need {need / 1e9:.1f} GB on {at.device}, but {free / 1e9:.1f} GB are free; "
            "use a smaller --shape, --dtype bfloat16 or a --weights-type"
        )
    compute_as_named(at)
    module = random_model(config, at, kind)
    speed_up(module, at, "sdpa", compiled=compiled)
    return MeasuredModel(module, at, f"{shape}, random", weights_type or at.dtype_name)


def torch_subject(module: CausalLM, target: Target, name: str, weights: str) -> Subject:
    """Describe the measured model of the torch path; `weights` tells how its weights are stored."""
    cuda = target.device.type == "cuda"
    return Subject(
        name=name,
        config=module.config,
        backend=str(target),
        weights=weights,
        weight_bytes=weight_bytes(module),
        cache_itemsize=target.dtype.itemsize,
        device_name=torch.cuda.get_device_name(target.device) if cuda else processor(),
        threads=None if cuda else torch.get_num_threads(),
        versions=versions(cuda=cuda),
    )


def parallel_subject(made: MeasuredModel, mesh: DeviceMesh) -> Subject:
    """Describe a measured model that is split over ranks, with the bytes that all ranks read."""
    alone = torch_subject(made.module, made.target, made.name, made.weights)
    n_bytes = int(summed(torch.tensor(alone.weight_bytes), mesh["tp"]))
    return replace(alone, backend=named_on(made.target, mesh), weight_bytes=n_bytes)


def versions(*, cuda: bool) -> dict[str, str]:
    """Return the versions of Python, NumPy and torch, and on CUDA of CUDA and Triton."""
    found = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    if cuda:
        found["cuda"] = str(torch.version.cuda)
        try:
            found["triton"] = version("triton")
        except PackageNotFoundError:
            found["triton"] = "absent"
    return found
