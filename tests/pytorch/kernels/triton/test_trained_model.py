"""Gradients of a whole model that has the kernels of training, against those of the plain model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.training_passes import ALL
from torch import Tensor

pytest.importorskip("triton", reason="NOT RUN: triton not installed")

from llorch.families.config import ModelConfig
from llorch.files.quant import GGMLType
from llorch.pytorch.causal_lm import CausalLM, RMSNorm
from llorch.pytorch.device import Target
from llorch.pytorch.kernels import TRAINED, kernel_selection
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.triton.fused import FusedRMSNorm
from llorch.pytorch.kernels.triton.kernels import TRITON_KERNELS
from llorch.pytorch.kernels.triton.quantised import back_by_library, multiply_by_library
from llorch.pytorch.lora.adapters import attach
from llorch.pytorch.random_weights import random_model
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states
from llorch.training.batch import Batch

KERNELS = {kind: make for kind, make in TRITON_KERNELS.items() if kind.startswith(TRAINED)}
IDS = np.arange(12).reshape(2, 6)
BATCH = Batch(IDS, IDS, np.tile(np.arange(6), (2, 1)), np.zeros_like(IDS), np.arange(2))


def model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Random weights that are numbers of bfloat16; the projections of the first half of a layer are trained."""
    made, generator = CausalLM(config), torch.Generator().manual_seed(0)
    for name, weight in made.named_parameters():
        start = torch.randn(weight.shape, generator=generator) * (0.3 if weight.ndim > 1 else 0.5)
        weight.data = (start + (1 if "norm" in name else 0)).bfloat16()
        weight.requires_grad_("self_attn" in name and "norm" not in name)
    use_sdpa(made)  # as training does
    return made.to(device, dtype)


def with_kernels(made: CausalLM, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """Kernels as on a CUDA device whose check found all of them right."""
    monkeypatch.setattr(kernel_selection, "built_kernels", lambda at, *, training: KERNELS)
    weight = made.model.norm.weight
    kernel_selection.speed_up_training(made, Target(weight.device, weight.dtype))
    assert not [path for path, module in made.named_modules() if isinstance(module, RMSNorm)]
    assert len([path for path, module in made.named_modules() if isinstance(module, FusedRMSNorm)]) > 0
    return made


def packed_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Random packed matrices, with an adapter that is trained beside each projection."""
    made = random_model(config, Target(device, torch.float32), packed=GGMLType.Q4_0).to(dtype)
    use_sdpa(made)
    attach(made, random_adapter(config, target_modules=ALL), trainable=True)
    return made


def gradients(made: CausalLM, device: torch.device) -> dict[str, Tensor]:
    hidden = hidden_states(made, BATCH, device)
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden))
    found = {name: weight.grad for name, weight in made.named_parameters() if weight.grad is not None}
    return {"hidden": hidden.detach(), **found}


def distance(actual: Tensor, exact: Tensor) -> float:
    assert actual.shape == exact.shape
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_every_gradient_is_as_near_to_float64_as_that_of_the_plain_model(
    config: Any, qk_norm: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    config = replace(config, n_layers=2, qk_norm=qk_norm)
    exact = gradients(model(config, torch.float64, device), device)
    near = gradients(model(config, dtype, device), device)
    actual = gradients(with_kernels(model(config, dtype, device), monkeypatch), device)
    assert list(actual) == list(exact)
    assert len(actual) == 1 + 4 * config.n_layers
    for name, expected in exact.items():
        assert actual[name].dtype is dtype
        allowed = max(4 * distance(near[name], expected), 4 * torch.finfo(dtype).eps)
        assert distance(actual[name], expected) <= allowed, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_beside_packed_matrices_are_as_near_to_float64_as_those_of_the_plain_model(
    config: Any, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    config = replace(config, n_layers=1, hidden_size=32, intermediate_size=64, head_dim=8)
    exact = gradients(packed_model(config, torch.float64, device), device)
    near = gradients(packed_model(config, dtype, device), device)
    made = with_kernels(packed_model(config, dtype, device), monkeypatch)
    layers = [module for module in made.modules() if isinstance(module, QuantisedLinear)]
    assert {(layer.multiply, layer.multiply_back) for layer in layers} == {(multiply_by_library, back_by_library)}
    actual = gradients(made, device)
    assert list(actual) == list(exact)
    assert len(actual) == 1 + 2 * 7
    for name, expected in exact.items():
        allowed = max(4 * distance(near[name], expected), 4 * torch.finfo(dtype).eps)
        assert distance(actual[name], expected) <= allowed, name


def test_a_block_that_is_computed_again_gives_the_same_gradients(config, device, monkeypatch):
    config = replace(config, n_layers=1)
    once = with_kernels(model(config, torch.float32, device), monkeypatch)
    again = with_kernels(model(config, torch.float32, device), monkeypatch)
    checkpoint_gradients(again)
    expected, actual = gradients(once, device), gradients(again, device)
    assert expected.keys() == actual.keys()
    assert len(actual) == 1 + 4
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
