"""What a Triton kernel may differ by from its plain twin in float64, and where kernels run in tests."""

import os
from typing import Any

import pytest
import torch

EPS = 2.0**-24  # half a step of float32: what one operation in it is off by, relative to its result
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative, at most
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}  # above zero
DTYPES: list[Any] = [torch.float32, torch.bfloat16, torch.float16]
PLACES: list[Any] = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


def kernel_device(place: str) -> torch.device:
    """The device that kernels run on in the interpreter or on CUDA; skips where that is not here."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if place == "interpreter":
        if not interpreted:
            pytest.skip("NOT RUN: the interpreter is off where there is a device")
        return torch.device("cpu")
    assert not interpreted
    return torch.device("cuda")


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of two tensors, as a share of the norm of the expected one."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, inner: torch.Tensor, device: torch.device) -> None:
    """Check that a result is the exact one, off by at most `inner` before it is rounded once to its dtype.

    A rounding is off by half a step; Triton's interpreter cuts bfloat16 off instead, which is off by a whole one.
    """
    assert actual.shape == exact.shape
    assert actual.device.type == device.type
    assert actual.isfinite().all()
    assert exact.dtype is torch.float64
    steps = 2 if device.type == "cpu" and actual.dtype is torch.bfloat16 else 1
    allowed = inner + steps * (HALF_STEP[actual.dtype] * (exact.abs() + inner) + SMALLEST[actual.dtype] / 2)
    off = (actual.double() - exact).abs()
    assert (off <= allowed).all(), f"{(off / allowed).max()} times what is allowed"
