"""Torch backends of `llorch verify --backend torch`, and the functions that judge a model on them; needs torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llorch.judging.expectations.packed import compare_own_kernels, verify_quantised_torch
from llorch.judging.runners import Runner
from llorch.judging.runners.torch import parallel_runners, torch_runners
from llorch.judging.runners.training_torch import DTYPES as TRAINED_DTYPES
from llorch.judging.runners.training_torch import verify_training_torch
from llorch.judging.types import Comparison
from llorch.judging.verify import verify_live, verify_stored
from llorch.pytorch.device import Kernels, Target, target
from llorch.pytorch.distributed.launch import DeviceMesh, named_on

DTYPES = ("float64", "float32", "bfloat16")  # judged by default


@dataclass(frozen=True)
class TorchBackend:
    """Device and dtype of the torch path, with the functions that judge a model there."""

    target: Target
    mesh: DeviceMesh | None = None

    @property
    def name(self) -> str:
        """Name in the rows: `torch-cpu-float32`, or `torch-cpu-float32-dp2-tp2` on a mesh."""
        return named_on(self.target, self.mesh) if self.mesh else str(self.target)

    @property
    def _runners(self) -> Callable[..., Iterator[Runner]]:
        """Return the function that makes the runners, which compute stages: over the mesh, or on one device."""
        return parallel_runners(self.target, self.mesh) if self.mesh else torch_runners(self.target)

    def stored(self, model: str) -> Iterator[Comparison]:
        """Judge a built-in model against its goldens, the stored outputs of the reference engines."""
        return verify_stored(model, self._runners, backend=self.name)

    def kernels(self) -> Iterator[Comparison]:
        """Compare llorch's kernels with torch's, if they were requested by name."""
        return compare_own_kernels(self.target) if self.target.kernels == "own" else iter(())

    @property
    def forks(self) -> bool:
        """True if forked processes can judge on it: not on CUDA or a mesh, and not if `own` measures times."""
        return self.target.device.type == "cpu" and self.mesh is None and self.target.kernels != "own"

    @property
    def trains(self) -> bool:
        """True if its dtype has tolerances for training."""
        return self.target.dtype_name in TRAINED_DTYPES

    def training(self, model: str) -> Iterator[Comparison]:
        """Judge training on a built-in model against its goldens."""
        return verify_training_torch(model, self.target, self.mesh)

    def quantised(self) -> Iterator[Comparison]:
        """Judge packed matrices against the goldens of checkpoint 13, the validation point of quantised matrices."""
        return verify_quantised_torch(self.target)

    @property
    def live(self) -> Callable[..., Iterator[Comparison]]:
        """Function that judges any model against engines, with the arguments of `verify_live`."""
        return partial(verify_live, runners=self._runners, backend=self.name)


def torch_backends(
    device: str | None, dtype: str | None, kernels: Kernels, mesh: DeviceMesh | None = None
) -> Sequence[TorchBackend]:
    """List the requested targets: by default the CPU with each of `DTYPES`."""
    return [TorchBackend(target(device or "cpu", name, kernels), mesh) for name in ([dtype] if dtype else DTYPES)]


def backends_not_run(backends: Sequence[TorchBackend]) -> Mapping[str, str]:
    """List the kinds of device that a run leaves out, and why, because a skip is not a pass."""
    import torch

    kinds = {backend.target.device.type for backend in backends}
    no_cuda = "not requested; add --device cuda" if torch.cuda.is_available() else "torch finds no CUDA device"
    reasons = {"torch-cpu-*": ("cpu", "not requested; add --device cpu"), "torch-cuda-*": ("cuda", no_cuda)}
    return {name: reason for name, (kind, reason) in reasons.items() if kind not in kinds}
