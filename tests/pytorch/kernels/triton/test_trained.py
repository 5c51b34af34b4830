"""Gradients of norm, rotation and activation in one launch each, against torch's gradients in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.kernel_tolerances import EPS, assert_rounded, distance, random
from helpers.training_passes import ALL
from torch import Tensor

from llorch.families.config import ModelConfig
from llorch.files.quant import GGMLType
from llorch.pytorch.cache import NoCache, PassPlacement
from llorch.pytorch.causal_lm import CausalLM, RMSNorm, keep_nothing, rms_norm, rope, swiglu
from llorch.pytorch.causal_lm import rotate_and_cache as plain_rotate_and_cache
from llorch.pytorch.device import Target
from llorch.pytorch.kernels import TRAINED, kernel_selection
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.triton import trained
from llorch.pytorch.kernels.triton.fused import FusedRMSNorm
from llorch.pytorch.kernels.triton.kernels import TRITON_KERNELS
from llorch.pytorch.kernels.triton.quantised import back_by_library, multiply_by_library
from llorch.pytorch.kernels.triton.trained import TrainedRMSNorm
from llorch.pytorch.lora.adapters import attach
from llorch.pytorch.random_weights import random_model
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states
from llorch.training.batch import Batch
from tests.pytorch.kernels.triton.test_fused import EVERY_DTYPE, SUM, norm

pytest.importorskip("triton", reason="NOT RUN: triton not installed")
TURN = 3 * EPS * 6  # two products and their sum in float32; no two parts of a sum are together larger than 6


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The result of a function, and the gradients of its inputs."""
    given = [x.detach().requires_grad_() for x in inputs]
    made = function(*given)
    return made.detach(), *torch.autograd.grad(made, given, grad)


def norm_inner(x: Tensor, grad: Tensor, norm: RMSNorm) -> Tensor:
    """The sum of squares is in all of a gradient and twice in its second term, which has a sum more."""
    wide, scaled = x.double(), (grad.double() * norm.weight.double()).abs()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    normal = (wide * inverse).abs()
    sizes = inverse * (scaled + normal * (scaled * normal).mean(-1, keepdim=True))
    return (2.5 * SUM + 20) * EPS * sizes


def assert_norm(x: Tensor, grad: Tensor, norm: RMSNorm, device: torch.device) -> None:
    y, d_x = gradients(TrainedRMSNorm(norm), [x], grad)
    weight = norm.weight.double()
    exact_y, exact = gradients(lambda x_float64: rms_norm(x_float64, weight, eps=norm.eps), [x.double()], grad.double())
    assert_rounded(y, exact_y, (SUM / 2 + 6) * EPS * exact_y.abs(), device)
    assert_rounded(d_x, exact, norm_inner(x, grad, norm), device)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 300), (2, 3, 2500), (2, 5, 3, 20), (1, 7, 2, 64), (37, 128)], ids=str)
def test_norm_of_any_leading_rows_has_torchs_gradient(shape, dtype, device):
    x, grad = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (4, 5))
    assert_norm(x, grad, norm(shape[-1], dtype, device), device)


@EVERY_DTYPE
def test_norm_of_small_numbers_sees_epsilon_in_its_gradient(dtype, device):
    x, grad = (random(3, 96, dtype=dtype, device=device, seed=seed) for seed in (6, 7))
    assert_norm(x * 0.003, grad * 0.003, norm(96, dtype, device), device)


def test_norm_reads_strided_gradients_and_inputs(device):
    x, grad = (random(4, 3, 27, dtype=torch.float32, device=device, seed=seed)[..., :20] for seed in (8, 9))
    assert_norm(x, grad, norm(20, torch.float32, device), device)
    assert_norm(x, grad[:1, :1, :1].expand(4, 3, 20), norm(20, torch.float32, device), device)


def test_norm_whose_gain_is_trained_gives_the_gain_its_gradient(device):
    x, grad = (random(3, 20, dtype=torch.float32, device=device, seed=seed) for seed in (10, 11))
    plain = norm(20, torch.float32, device)
    plain.weight.requires_grad_()
    (expected,) = torch.autograd.grad(plain(x), plain.weight, grad)
    (actual,) = torch.autograd.grad(TrainedRMSNorm(plain)(x), plain.weight, grad)
    assert torch.equal(actual, expected)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 1025), (1, 9, 4864)], ids=str)
def test_swiglu_has_torchs_gradients(shape, dtype, device):
    gate, up, grad = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (12, 13, 14))
    assert_swiglu(gate * 4, up, grad, device)


def test_swiglu_of_extreme_gates_has_finite_gradients(device):
    gate = torch.tensor([-1e4, -300.0, -80.0, -1.2784645, 0.0, 80.0, 300.0, 1e4], device=device)
    assert_swiglu(gate, torch.full_like(gate, 3.0), torch.full_like(gate, -2.0), device)


def test_swiglu_reads_strided_gradients(device):
    gate, up, grad = (random(5, 6, dtype=torch.float32, device=device, seed=seed).T for seed in (15, 16, 17))
    assert_swiglu(gate, up, grad, device)


def assert_swiglu(gate: Tensor, up: Tensor, grad: Tensor, device: torch.device) -> None:
    """The exponential is off by its argument's rounding; the sigmoid is twice in the gradient of the gate."""
    wide, wide_up, wide_grad = gate.double(), up.double(), grad.double()
    exact = gradients(swiglu, [wide, wide_up], wide_grad)
    share = wide.sigmoid()
    sizes = (wide_grad * wide_up).abs() * share * (1 + wide.abs() * (-wide).sigmoid())
    inners = [(1.5 * wide.abs() + 8) * EPS * exact[0].abs(), (3 * wide.abs() + 16) * EPS * sizes]
    inners.append((1.5 * wide.abs() + 8) * EPS * exact[2].abs())
    for actual, expected, inner in zip(gradients(trained.swiglu, [gate, up], grad), exact, inners, strict=True):
        assert_rounded(actual, expected, inner, device)


class RotationCase:
    """Queries, keys and values of some tokens, gradients of what comes out, and a place for each token."""

    def __init__(self, heads: tuple[int, int], head_dim: int, dtype: Any, device: torch.device) -> None:
        self.device = device
        shapes = [(2, 3, n, head_dim) for n in (*heads, heads[1])]
        kind = {"dtype": dtype, "device": device}
        self.q, self.k, self.v = (random(*shape, **kind, seed=seed) for seed, shape in enumerate(shapes, start=18))
        self.grads = [random(*shape, **kind, seed=seed) for seed, shape in enumerate(shapes[:2], start=21)]
        self.angles = random(2, 3, head_dim // 2, dtype=torch.float32, device=device, seed=23) * 3

    def place(self, dtype: torch.dtype) -> PassPlacement:
        cos, sin = (table.to(dtype) for table in (self.angles.cos(), self.angles.sin()))
        return PassPlacement(torch.arange(3).expand(2, 3), cos, sin, None, 3)

    def run(self, rotate: Callable, dtype: torch.dtype | None = None, keep: Any = keep_nothing) -> tuple[Tensor, ...]:
        """Rotated queries and keys, values, and the gradients of queries and keys; `dtype`: compute in it."""
        q, k, v, *grads = (x if dtype is None else x.to(dtype) for x in (self.q, self.k, self.v, *self.grads))
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        place = self.place(torch.float32 if dtype is None else dtype)
        turned, keys, values = rotate(q, k, v, 1, place, NoCache(self.device), keep)
        made = turned, keys.transpose(1, 2)
        return *(x.detach() for x in made), values.transpose(1, 2), *torch.autograd.grad(made, [q, k], grads)


@EVERY_DTYPE
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 20), ((6, 2), 64), ((7, 1), 128)], ids=str)
def test_rotation_turns_gradients_back(heads, head_dim, dtype, device):
    turning = RotationCase(heads, head_dim, dtype, device)
    actual = turning.run(trained.rotate_and_cache)
    exact = turning.run(plain_rotate_and_cache, torch.float64)
    assert torch.equal(actual[2], turning.v)
    for one, expected in zip(actual, exact, strict=True):
        assert_rounded(one, expected, TURN * torch.ones_like(expected), device)


def test_rotation_reads_heads_and_gradients_in_any_order(device):
    turning = RotationCase((6, 2), 8, torch.float32, device)
    expected = turning.run(trained.rotate_and_cache)
    turning.q, turning.k, *turning.grads = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (turning.q, turning.k, *turning.grads)
    )
    for actual, one in zip(turning.run(trained.rotate_and_cache), expected, strict=True):
        assert torch.equal(actual, one)
    turning.grads = [grad[..., :1].expand_as(grad) for grad in turning.grads]  # as a sum over heads gives
    exact = turning.run(plain_rotate_and_cache, torch.float64)
    for actual, one in zip(turning.run(trained.rotate_and_cache), exact, strict=True):
        assert_rounded(actual, one, TURN * torch.ones_like(one), device)


def test_an_observer_of_the_rotation_sees_every_stage_and_may_replace_it(device):
    turning, seen = RotationCase((6, 2), 8, torch.float32, device), {}

    def keep(name: str, array: Tensor) -> Tensor:
        seen[name] = array
        return 2 * array if name == "k_rope" else array

    keys = turning.run(trained.rotate_and_cache, keep=keep)[1]
    assert list(seen) == ["q_rope", "k_rope", "k_cache", "v_cache"]
    exact = rope(turning.k.double(), *(table.double() for table in (turning.angles.cos(), turning.angles.sin())))
    assert_rounded(seen["k_rope"].detach(), exact, TURN * torch.ones_like(exact), device)
    assert torch.equal(keys, 2 * seen["k_rope"])


def test_partially_rotated_heads_use_the_reference_function(device):
    turning = RotationCase((6, 2), 8, torch.float32, device)
    turning.angles = turning.angles[..., :2]
    for actual, expected in zip(
        turning.run(trained.rotate_and_cache), turning.run(plain_rotate_and_cache), strict=True
    ):
        assert torch.equal(actual, expected)


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


def with_kernels(causal_lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """Kernels as on a CUDA device whose check found all of them right."""
    monkeypatch.setattr(kernel_selection, "built_kernels", lambda target, *, training: KERNELS)
    weight = causal_lm.model.norm.weight
    kernel_selection.speed_up_training(causal_lm, Target(weight.device, weight.dtype))
    assert not [path for path, module in causal_lm.named_modules() if isinstance(module, RMSNorm)]
    assert len([path for path, module in causal_lm.named_modules() if isinstance(module, FusedRMSNorm)]) > 0
    return causal_lm


def packed_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Random packed matrices, with an adapter that is trained beside each projection."""
    made = random_model(config, Target(device, torch.float32), packed=GGMLType.Q4_0).to(dtype)
    use_sdpa(made)
    attach(made, random_adapter(config, target_modules=ALL), trainable=True)
    return made


def model_gradients(causal_lm: CausalLM, device: torch.device) -> dict[str, Tensor]:
    hidden = hidden_states(causal_lm, BATCH, device)
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden))
    found = {name: weight.grad for name, weight in causal_lm.named_parameters() if weight.grad is not None}
    return {"hidden": hidden.detach(), **found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_every_gradient_is_as_near_to_float64_as_without_kernels(
    config: Any, qk_norm: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    config = replace(config, n_layers=2, qk_norm=qk_norm)
    exact = model_gradients(model(config, torch.float64, device), device)
    near = model_gradients(model(config, dtype, device), device)
    actual = model_gradients(with_kernels(model(config, dtype, device), monkeypatch), device)
    assert list(actual) == list(exact)
    assert len(actual) == 1 + 4 * config.n_layers
    for name, expected in exact.items():
        assert actual[name].dtype is dtype
        allowed = max(4 * distance(near[name], expected), 4 * torch.finfo(dtype).eps)
        assert distance(actual[name], expected) <= allowed, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_on_packed_matrices_are_as_near_to_float64_as_without_kernels(
    config: Any, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    config = replace(config, n_layers=1, hidden_size=32, intermediate_size=64, head_dim=8)
    exact = model_gradients(packed_model(config, torch.float64, device), device)
    near = model_gradients(packed_model(config, dtype, device), device)
    made = with_kernels(packed_model(config, dtype, device), monkeypatch)
    layers = [module for module in made.modules() if isinstance(module, QuantisedLinear)]
    assert {(layer.multiply, layer.multiply_back) for layer in layers} == {(multiply_by_library, back_by_library)}
    actual = model_gradients(made, device)
    assert list(actual) == list(exact)
    assert len(actual) == 1 + 2 * 7
    for name, expected in exact.items():
        allowed = max(4 * distance(near[name], expected), 4 * torch.finfo(dtype).eps)
        assert distance(actual[name], expected) <= allowed, name


def test_recomputed_block_gives_the_same_gradients(config, device, monkeypatch):
    config = replace(config, n_layers=1)
    once = with_kernels(model(config, torch.float32, device), monkeypatch)
    again = with_kernels(model(config, torch.float32, device), monkeypatch)
    checkpoint_gradients(again)
    expected, actual = model_gradients(once, device), model_gradients(again, device)
    assert expected.keys() == actual.keys()
    assert len(actual) == 1 + 4
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
