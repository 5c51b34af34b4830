"""Kernels that replace modules of `llorch.pytorch.causal_lm`: C for the CPU, Triton for CUDA, and their checks."""

from collections.abc import Callable, Mapping
from typing import Any

KernelTable = Mapping[str, Callable[[Any], Any]]  # module kind -> function that makes the kernel from the module
TRAINED = "trained "  # prefix of kinds whose kernels support backward; others are for inference
