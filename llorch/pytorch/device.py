"""Device and dtype of the torch path; a requested device is used or refused, never replaced."""

import re
import warnings
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from llorch.ops.numerics import DtypeName
from llorch.runtime.errors import MissingDevice, UserError

Kernels = Literal["auto", "torch", "own"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

_MIN_CAPABILITY = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}  # of CUDA; the CPU has all dtypes
_IGNORED_WARNINGS = (  # CUDA warnings of torch about intended settings
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    "Attempting to run cuBLAS, but there was no current CUDA context",  # in a backward thread, which then sets it
    r"\s*Online softmax is disabled on the fly since Inductor decides to",
)


@dataclass(frozen=True)
class Target:
    """Device (with its index on CUDA), dtype of weights and activations, and choice of kernels."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels = "auto"  # see `load_torch`

    @property
    def dtype_name(self) -> DtypeName:
        """Name of the dtype on the command line."""
        return next(name for name in get_args(DtypeName) if getattr(torch, name) == self.dtype)

    def __str__(self) -> str:
        """Format the target as in results of `llorch verify`: `torch-cpu-float32`."""
        return f"torch-{self.device.type}-{self.dtype_name}"


def target(device: str = "cpu", dtype: str = "float32", kernels: str = "auto") -> Target:
    """Validate a request: `cpu`, `cuda` or `cuda:N`, a key of `DTYPES`, and a choice of kernels."""
    if kernels not in get_args(Kernels):
        raise UserError(f"kernels: expected one of {', '.join(get_args(Kernels))}, got {kernels!r}")
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    match = re.fullmatch("cpu|cuda(?::([0-9]{1,4}))?", device)
    if match is None:
        raise UserError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu":
        return Target(torch.device("cpu"), DTYPES[dtype], cast(Kernels, kernels))
    index = int(match[1] or 0)
    _require_cuda(device, index, DTYPES[dtype])
    return Target(torch.device("cuda", index), DTYPES[dtype], cast(Kernels, kernels))


def compute_as_named(target: Target) -> None:
    """Make products as exact as their dtype, in the whole process (no TF32); silence torch's warnings about this."""
    torch.set_float32_matmul_precision("highest")  # no TF32, no bfloat16 parts
    if target.device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.cuda.set_device(target.device)  # Triton launches on the current device, wherever its tensors are
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message, UserWarning)


def _require_cuda(device: str, index: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise MissingDevice(f"device {device}: {why} (torch {torch.__version__}); use --device cpu")
    require_index(device, index, torch.cuda.device_count())
    require_dtype(device, torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), dtype)


def require_index(device: str, index: int, count: int) -> None:
    """Refuse a device index beyond the last device."""
    if index >= count:
        raise MissingDevice(f"device {device}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")


def require_dtype(device: str, name: str, capability: tuple[int, int], dtype: torch.dtype) -> None:
    """Refuse a dtype that a CUDA device does not support; torch would emulate it slowly without a warning."""
    if capability < _MIN_CAPABILITY.get(dtype, (0, 0)):
        minimum = ".".join(map(str, _MIN_CAPABILITY[dtype]))
        raise MissingDevice(
            f"device {device}: {name} (compute capability {capability[0]}.{capability[1]}) has no "
            f"{str(dtype).removeprefix('torch.')}, which needs {minimum}; use --dtype float32"
        )
