"""Gradients of norm, rotation and activation in one launch each, against torch's gradients in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.kernel_tolerances import EPS, assert_rounded, random
from torch import Tensor

pytest.importorskip("triton", reason="NOT RUN: triton not installed")

from llorch.pytorch.cache import NoCache, PassPlacement
from llorch.pytorch.causal_lm import RMSNorm, keep_nothing, rms_norm, rope, swiglu
from llorch.pytorch.causal_lm import rotate_and_cache as plain_rotate_and_cache
from llorch.pytorch.kernels.triton import trained
from llorch.pytorch.kernels.triton.trained import TrainedRMSNorm
from tests.pytorch.kernels.triton.test_fused import EVERY_DTYPE, SUM, norm

TURN = 3 * EPS * 6  # two products and their sum in float32; no two parts of a sum are together larger than 6


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The result of a function, and the gradients of its inputs."""
    given = [x.detach().requires_grad_() for x in inputs]
    made = function(*given)
    return made.detach(), *torch.autograd.grad(made, given, grad)


def norm_inner(x: Tensor, grad: Tensor, plain: RMSNorm) -> Tensor:
    """The sum of squares is in all of a gradient and twice in its second term, which has a sum more."""
    wide, scaled = x.double(), (grad.double() * plain.weight.double()).abs()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + plain.eps)
    normal = (wide * inverse).abs()
    sizes = inverse * (scaled + normal * (scaled * normal).mean(-1, keepdim=True))
    return (2.5 * SUM + 20) * EPS * sizes


def assert_norm(x: Tensor, grad: Tensor, plain: RMSNorm, device: torch.device) -> None:
    y, d_x = gradients(TrainedRMSNorm(plain), [x], grad)
    weight = plain.weight.double()
    exact_y, exact = gradients(lambda wide: rms_norm(wide, weight, eps=plain.eps), [x.double()], grad.double())
    assert_rounded(y, exact_y, (SUM / 2 + 6) * EPS * exact_y.abs(), device)
    assert_rounded(d_x, exact, norm_inner(x, grad, plain), device)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 300), (2, 3, 2500), (2, 5, 3, 20), (1, 7, 2, 64), (37, 128)], ids=str)
def test_norm_of_any_leading_rows_has_torchs_gradient(shape, dtype, device):
    x, grad = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (4, 5))
    assert_norm(x, grad, norm(shape[-1], dtype, device), device)


@EVERY_DTYPE
def test_norm_of_small_numbers_sees_epsilon_in_its_gradient(dtype, device):
    x, grad = (random(3, 96, dtype=dtype, device=device, seed=seed) for seed in (6, 7))
    assert_norm(x * 0.003, grad * 0.003, norm(96, dtype, device), device)


def test_norm_reads_gradients_and_inputs_that_do_not_lie_side_by_side(device):
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


def test_swiglu_of_far_gates_has_finite_gradients(device):
    gate = torch.tensor([-1e4, -300.0, -80.0, -1.2784645, 0.0, 80.0, 300.0, 1e4], device=device)
    assert_swiglu(gate, torch.full_like(gate, 3.0), torch.full_like(gate, -2.0), device)


def test_swiglu_reads_gradients_that_do_not_lie_side_by_side(device):
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


class Turning:
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
    turning = Turning(heads, head_dim, dtype, device)
    actual = turning.run(trained.rotate_and_cache)
    exact = turning.run(plain_rotate_and_cache, torch.float64)
    assert torch.equal(actual[2], turning.v)
    for one, expected in zip(actual, exact, strict=True):
        assert_rounded(one, expected, TURN * torch.ones_like(expected), device)


def test_rotation_reads_heads_and_gradients_in_any_order(device):
    turning = Turning((6, 2), 8, torch.float32, device)
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
    turning, seen = Turning((6, 2), 8, torch.float32, device), {}

    def keep(name: str, array: Tensor) -> Tensor:
        seen[name] = array
        return 2 * array if name == "k_rope" else array

    keys = turning.run(trained.rotate_and_cache, keep=keep)[1]
    assert list(seen) == ["q_rope", "k_rope", "k_cache", "v_cache"]
    exact = rope(turning.k.double(), *(table.double() for table in (turning.angles.cos(), turning.angles.sin())))
    assert_rounded(seen["k_rope"].detach(), exact, TURN * torch.ones_like(exact), device)
    assert torch.equal(keys, 2 * seen["k_rope"])


def test_heads_of_which_a_part_is_turned_go_to_the_plain_function(device):
    turning = Turning((6, 2), 8, torch.float32, device)
    turning.angles = turning.angles[..., :2]
    for actual, expected in zip(
        turning.run(trained.rotate_and_cache), turning.run(plain_rotate_and_cache), strict=True
    ):
        assert torch.equal(actual, expected)
