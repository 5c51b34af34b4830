"""A model in torch whose leaves record gradients; those for inference do not."""

from typing import Any, cast

from llorch.files import Weights
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.cpu.frozen_linear import freeze_linears
from llorch.pytorch.device import Target, compute_as_named
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.memory import require_memory
from llorch.pytorch.sdpa import use_sdpa


def load_for_training(weights: Weights, at: Target, *, residency: str, batch: int, n_tokens: int) -> CausalLM:
    """Load a model, its weights frozen, for forward passes of `batch` rows of `n_tokens`."""
    compute_as_named(at)
    chosen = require_memory(weights, at, cast(Any, residency), batch=batch, n_tokens=n_tokens)
    module = (load_packed if chosen == "packed" else load_dense)(weights, dtype=at.dtype, device=at.device)
    prepare(module)
    return module


def prepare(module: CausalLM) -> None:
    """Put the leaves in place that training runs on: fused attention, faster products of frozen weights."""
    use_sdpa(module)
    freeze_linears(module)
