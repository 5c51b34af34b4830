"""Timing of the torch model, with the same steps as generation."""

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
from llorch.pytorch.distributed.parallel_model import first_rank_tokens, load_parallel
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
    """The torch model on one device; see `llorch.apps.bench.measure.TimedEngine`."""

    def __init__(self, module: CausalLM, target: Target, load: Load, *, compiled: bool = False) -> None:
        """Reserve the KV cache; the module must already have its kernels."""
        cuda = target.device.type == "cuda"
        self._target, self._load, config = target, load, self._cache_config(module.config)
        self._chunk = max(1, CHUNK[target.device.type] // load.batch)  # tokens of each prompt per prefill chunk
        self._jobs = [
            Job(row, load.decode + 1, SamplingSettings(), frozenset())  # + 1: prefill samples the first token
            for row in prompts(load, config.vocab_size).tolist()
        ]
        cache = Cache(
            config, batch=load.batch, n_slots=load.prompt + load.decode, dtype=target.dtype, device=target.device
        )
        self._decoding = Decoding(module, cache, Needs.of([SamplingSettings()] * load.batch), n_end_ids=1)
        if compiled:
            self._decoding.forward = compiled_forward(module, growing=not cuda)
        if (graph := built_kernels(target).get("graph")) is not None:
            self._decoding.replay = graph(None)  # records a decode step as a CUDA graph, then replays it

    def _cache_config(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration that gives the cache its shape."""
        return config

    @property
    def tokens(self) -> Tensor:
        """Tokens of the last round, one row per prompt, the one from prefill first."""
        return self._decoding.tokens[:, : self._load.decode + 1]

    @property
    def logprobs(self) -> Tensor:
        """Log probabilities of `tokens`."""
        return self._decoding.logprobs[:, : self._load.decode + 1]

    def prefill(self) -> None:
        """See `TimedEngine`."""
        self._decoding.begin(self._jobs, chunk=self._chunk)
        self._wait()

    def decode(self) -> None:
        """See `TimedEngine`."""
        for _ in range(self._load.decode):
            self._decoding.advance()
        self._wait()

    def copy_rate(self) -> float:
        """See `TimedEngine`."""
        n_bytes = COPY_BYTES[self._target.device.type]
        source = torch.ones(n_bytes, dtype=torch.uint8, device=self._target.device)
        copy = torch.empty_like(source)
        return 2 * n_bytes / best_time(lambda: (copy.copy_(source), self._wait()))

    def product_rate(self) -> float:
        """See `TimedEngine`; on the CPU the faster of torch's two libraries, because llorch's kernels choose one."""
        width, target = PRODUCT_WIDTH[self._target.device.type], self._target
        matrix = torch.randn(width, width, device=target.device).to(target.dtype)
        modules: list[nn.Module] = [nn.Linear(width, width, bias=False, device=target.device, dtype=target.dtype)]
        if target.device.type == "cpu":
            modules.append(faster(modules[0], cpu_kernels(None, target.dtype)))
        return 2 * width**3 / min(best_time(lambda module=module: (module(matrix), self._wait())) for module in modules)

    def _wait(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)


class ParallelEngine(TorchEngine):
    """One rank (process) of a tensor-parallel model; the ceilings are the sums over all ranks."""

    def __init__(self, module: CausalLM, target: Target, load: Load, ranks: DeviceMesh) -> None:
        """Reserve the KV cache for the heads of this rank."""
        self._ranks = ranks
        super().__init__(module, target, load)
        self._decoding.agree = first_rank_tokens(ranks)  # every rank continues with the tokens of rank 0

    def _cache_config(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of one rank (process of the mesh), which has a share of the heads."""
        return of_a_rank(config, self._ranks.size())

    def copy_rate(self) -> float:
        """See `TimedEngine`."""
        return self._sum_rates(super().copy_rate)

    def product_rate(self) -> float:
        """See `TimedEngine`."""
        return self._sum_rates(super().product_rate)

    def _sum_rates(self, rate: Callable[[], float]) -> float:
        """Measure on all ranks at the same time, and return the sum of their rates."""
        dist.barrier(self._ranks.get_group())
        return float(summed(torch.tensor(rate()), self._ranks))


@dataclass(frozen=True)
class MeasuredModel:
    """A loaded model with its kernels installed."""

    module: CausalLM
    target: Target
    name: str  # of the file or of the shape
    weights: str  # format in memory


def opened(path: Path, target: Target, residency: Residency, load: Load, *, compiled: bool) -> MeasuredModel:
    """Load a file or folder; see `load_torch`."""
    load.require(open_weights(path).config)
    n_tokens = load.batch * (load.prompt + load.decode)
    model = load_torch(
        path, device=str(target.device), dtype=target.dtype_name, kernels=target.kernels, residency=residency,
        compiled=compiled, n_tokens=n_tokens,
    )  # fmt: skip
    return _to_measured(model)


def opened_on(mesh: DeviceMesh, path: Path, target: Target, residency: Residency, load: Load) -> MeasuredModel:
    """Load this rank's share of a file or folder; see `load_parallel`."""
    load.require(open_weights(path).config)
    n_tokens = load.batch * (load.prompt + load.decode)
    options: Any = {"dtype": target.dtype_name, "kernels": target.kernels, "residency": residency}
    return _to_measured(load_parallel(path, mesh, n_tokens=n_tokens, **options))


def _to_measured(model: TorchModel) -> MeasuredModel:
    packed = sorted({module.ggml_type.name for module in model.module.modules() if isinstance(module, PackedMatrix)})
    return MeasuredModel(model.module, model.target, model.name, "+".join(packed) or model.target.dtype_name)


def random(shape: str, target: Target, weights_type: str | None, load: Load, *, compiled: bool) -> MeasuredModel:
    """Make a model with random weights of a shape, a key of `SHAPES`; `weights_type`: a quantised block type."""
    config = SHAPES[shape]
    load.require(config)
    kind = None if weights_type is None else kind_named(weights_type)
    need, free = random_bytes(config, target, kind), free_memory(target.device)
    if need > free:
        raise MemoryError(
            f"bench: weights of {shape} need {need / 1e9:.1f} GB on {target.device}, but {free / 1e9:.1f} GB are free; "
            "use a smaller --shape, --dtype bfloat16 or a --weights-type"
        )
    compute_as_named(target)
    module = random_model(config, target, kind)
    speed_up(module, target, "sdpa", compiled=compiled)
    return MeasuredModel(module, target, f"{shape}, random", weights_type or target.dtype_name)


def torch_subject(module: CausalLM, target: Target, name: str, weights: str) -> Subject:
    """Describe a model that is measured on torch; `weights` is the format of its weights."""
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


def parallel_subject(measured: MeasuredModel, mesh: DeviceMesh) -> Subject:
    """Describe a tensor-parallel model, with the bytes that all ranks together read."""
    rank_subject = torch_subject(measured.module, measured.target, measured.name, measured.weights)
    n_bytes = int(summed(torch.tensor(rank_subject.weight_bytes), mesh["tp"]))
    return replace(rank_subject, backend=named_on(measured.target, mesh), weight_bytes=n_bytes)


def versions(*, cuda: bool) -> dict[str, str]:
    """Return the versions of Python, NumPy and torch, and on a GPU those of CUDA and Triton."""
    by_name = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    if cuda:
        by_name["cuda"] = str(torch.version.cuda)
        try:
            by_name["triton"] = version("triton")
        except PackageNotFoundError:
            by_name["triton"] = "absent"
    return by_name
