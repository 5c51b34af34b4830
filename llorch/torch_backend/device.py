"""Where the torch path runs and in which dtype; what was asked for by name is used or refused, never replaced."""

from dataclasses import dataclass

import torch

from llorch.errors import MissingDevice

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Target:
    """A device and a dtype.

    Attributes:
        device: With its index when it is a CUDA device.
        dtype: Of weights and activations.
    """

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """As the command line calls it."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        """As rows of a verification call the backend, `torch-cpu-float32`."""
        return f"torch-{self.device.type}-{self.dtype_name}"


def target(device: str = "cpu", dtype: str = "float32") -> Target:
    """Check what was asked for.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: A key of `DTYPES`.

    Returns:
        The target.

    Raises:
        ValueError: A name without a meaning.
        MissingDevice: The device is not here, or cannot compute in the dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda":
        _require_cuda(device, int(index or 0), DTYPES[dtype])
        return Target(torch.device("cuda", int(index or 0)), DTYPES[dtype])
    return Target(torch.device("cpu"), DTYPES[dtype])


def _require_cuda(device: str, index: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise MissingDevice(f"device {device}: {why} (torch {torch.__version__}); use --device cpu")
    if index >= torch.cuda.device_count():
        raise MissingDevice(
            f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0 on"
        )
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability(index) < (8, 0):
        name = torch.cuda.get_device_name(index)
        raise MissingDevice(f"device {device}: {name} has no bfloat16; use --dtype float16 or float32")
