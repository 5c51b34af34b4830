"""Targets of the torch path, by their names in rows; a target that is not here is NOT RUN, never passed."""

import pytest
import torch

from llorch.pytorch.device import Target, target

DTYPES = ("float32", "bfloat16", "float16", "float64")
CPU = tuple(f"torch-cpu-{dtype}" for dtype in DTYPES)
CUDA = tuple(f"torch-cuda-{dtype}" for dtype in DTYPES)


def target_or_skip(name: str) -> Target:
    """The target, or a skip that says what is missing."""
    _, device, dtype = name.split("-")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch finds no CUDA device")
    return target(device, dtype)
