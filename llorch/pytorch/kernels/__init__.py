"""Kernels that replace modules of the reference implementation: C for the CPU, Triton for CUDA, and their checks."""

from collections.abc import Callable, Mapping
from typing import Any

KernelTable = Mapping[str, Callable[[Any], Any]]  # kind of a module -> the function that makes its kernel of it
TRAINED = "trained "  # before the kind, where a kernel records gradients; kernels without it are for inference
