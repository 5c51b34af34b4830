"""The device and the dtype of the torch path; a device that is named is used or refused, never replaced."""

import re
import warnings
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from llorch.ops.numerics import DtypeName
from llorch.runtime.errors import MissingDevice, UserError

Kernels = Literal["auto", "torch", "own"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

_SINCE = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}  # compute capability of CUDA; the CPU has all dtypes
_NO_NEWS = (  # what torch says on CUDA that is meant to be so, or is for those who write it
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    "Attempting to run cuBLAS, but there was no current CUDA context",  # in the thread of a backward pass: it takes it
    r"\s*Online softmax is disabled on the fly since Inductor decides to",
)


@dataclass(frozen=True)
class Target:
    """A device, with its index if it is a CUDA device, the dtype of weights and activations, and whose kernels run."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels = "auto"  # torch: never ours. own: ours. auto: ours where they are right and no slower

    @property
    def dtype_name(self) -> DtypeName:
        """Name of the dtype on the command line."""
        return next(name for name in get_args(DtypeName) if getattr(torch, name) == self.dtype)

    def __str__(self) -> str:
        """Format the target as the backend of a row: `torch-cpu-float32`."""
        return f"torch-{self.device.type}-{self.dtype_name}"


def target(device: str = "cpu", dtype: str = "float32", kernels: str = "auto") -> Target:
    """Check what was asked for: `cpu`, `cuda` or `cuda:N`, a key of `DTYPES`, and whose kernels."""
    if kernels not in get_args(Kernels):
        raise UserError(f"kernels: expected one of {', '.join(get_args(Kernels))}, got {kernels!r}")
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    named = re.fullmatch("cpu|cuda(?::([0-9]{1,4}))?", device)
    if named is None:
        raise UserError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu":
        return Target(torch.device("cpu"), DTYPES[dtype], cast(Kernels, kernels))
    index = int(named[1] or 0)
    _require_cuda(device, index, DTYPES[dtype])
    return Target(torch.device("cuda", index), DTYPES[dtype], cast(Kernels, kernels))


def compute_as_named(at: Target) -> None:
    """Turn off, for the whole process, what makes products less exact than their dtype, and what CUDA says of that."""
    torch.set_float32_matmul_precision("highest")  # no TF32, no bfloat16 parts
    if at.device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.cuda.set_device(at.device)  # Triton launches on the current device, wherever its tensors are
        for message in _NO_NEWS:
            warnings.filterwarnings("ignore", message, UserWarning)


def _require_cuda(device: str, index: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise MissingDevice(f"device {device}: {why} (torch {torch.__version__}); use --device cpu")
    require_index(device, index, torch.cuda.device_count())
    require_dtype(device, torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), dtype)


def require_index(device: str, index: int, count: int) -> None:
    """Refuse a device beyond the last."""
    if index >= count:
        raise MissingDevice(f"device {device}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")


def require_dtype(device: str, name: str, capability: tuple[int, int], dtype: torch.dtype) -> None:
    """Refuse a dtype that a CUDA device has no products for; torch would emulate it, many times slower, unsaid."""
    if capability < _SINCE.get(dtype, (0, 0)):
        least = ".".join(map(str, _SINCE[dtype]))
        raise MissingDevice(
            f"device {device}: {name} (compute capability {capability[0]}.{capability[1]}) has no "
            f"{str(dtype).removeprefix('torch.')}, which needs {least}; use --dtype float32"
        )
