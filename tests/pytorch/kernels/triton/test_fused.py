"""Norm, activation and projections in one launch each, against the page in float64."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernel_tolerances import DTYPES, EPS, assert_rounded, random
from torch import nn

pytest.importorskip("triton", reason="NOT RUN: triton not installed")

from llorch.pytorch.causal_lm import RMSNorm, rms_norm, swiglu
from llorch.pytorch.kernels.triton import dense_matvec, fused
from llorch.pytorch.kernels.triton.dense_matvec import DenseLinear, multiply_row, share_launch
from llorch.pytorch.kernels.triton.fused import FusedRMSNorm

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SUM = 40  # roundings on the way of a term through a sum: those of one thread, then those of the tree of threads


def norm(width: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    plain = RMSNorm(width, 1e-5)
    plain.weight = nn.Parameter(1 + random(width, dtype=dtype, device=device, seed=1), requires_grad=False)
    return plain


def linear(width: int, out: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> nn.Linear:
    plain = nn.Linear(width, out, bias=bias)
    plain.weight = nn.Parameter(random(out, width, dtype=dtype, device=device, seed=2), requires_grad=False)
    if bias:
        plain.bias = nn.Parameter(random(out, dtype=dtype, device=device, seed=3), requires_grad=False)
    return plain


def assert_product(actual: torch.Tensor, x: torch.Tensor, layer: Any, device: torch.device) -> None:
    """Each term passes so many sums, each off by half a step of a sum no larger than that of all sizes."""
    wide, weight = x.double(), layer.weight.double()
    bias = torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.double()
    sizes = wide.abs() @ weight.abs().mT + bias.abs()
    assert_rounded(actual, wide @ weight.mT + bias, SUM * EPS * sizes, device)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 300), (2, 3, 2500), (2, 5, 3, 20), (1, 7, 2, 64), (37, 128)], ids=str)
def test_norm_of_any_leading_rows_is_that_of_the_page(shape, dtype, device):
    x, plain = random(*shape, dtype=dtype, device=device, seed=4), norm(shape[-1], dtype, device)
    exact = rms_norm(x.double(), plain.weight.double(), eps=plain.eps)
    inner = (SUM / 2 + 6) * EPS * exact.abs()  # the root halves the error of the sum
    assert_rounded(FusedRMSNorm(plain)(x), exact, inner, device)


@EVERY_DTYPE
def test_norm_of_small_numbers_sees_epsilon(dtype, device):
    x, plain = random(3, 96, dtype=dtype, device=device, seed=5) * 0.003, norm(96, dtype, device)
    exact = rms_norm(x.double(), plain.weight.double(), eps=plain.eps)
    assert_rounded(FusedRMSNorm(plain)(x), exact, (SUM / 2 + 6) * EPS * exact.abs(), device)


def test_norm_reads_rows_that_do_not_lie_side_by_side(device):
    x = random(4, 3, 27, dtype=torch.float32, device=device, seed=6)[..., :20]
    plain = norm(20, torch.float32, device)
    exact = rms_norm(x.double(), plain.weight.double(), eps=plain.eps)
    assert_rounded(FusedRMSNorm(plain)(x), exact, (SUM / 2 + 6) * EPS * exact.abs(), device)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 1025), (1, 9, 4864)], ids=str)
def test_swiglu_is_that_of_the_page(shape, dtype, device):
    gate, up = (random(*shape, dtype=dtype, device=device, seed=seed) * 4 for seed in (7, 8))
    exact = swiglu(gate.double(), up.double())
    inner = (1.5 * gate.double().abs() + 8) * EPS * exact.abs()  # exp is off by its argument's rounding
    assert_rounded(fused.swiglu(gate, up), exact, inner, device)


def test_swiglu_of_far_gates_neither_overflows_nor_vanishes(device):
    gate = torch.tensor([-1e4, -300.0, -80.0, 0.0, 80.0, 300.0, 1e4], device=device)
    up = torch.full_like(gate, 3.0)
    exact = swiglu(gate.double(), up.double())
    assert_rounded(fused.swiglu(gate, up), exact, (1.5 * gate.double().abs() + 8) * EPS * exact.abs(), device)


@EVERY_DTYPE
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("width", "out"), [(896, 5), (1500, 3), (20, 7), (300, 5), (4500, 3)])
def test_a_row_is_multiplied(width, out, bias, dtype, device):
    layer, x = linear(width, out, dtype, device, bias=bias), random(1, 1, width, dtype=dtype, device=device, seed=9)
    assert_product(DenseLinear(layer)(x), x, layer, device)


@EVERY_DTYPE
@pytest.mark.parametrize("out", [9, 17], ids=lambda out: f"{out} rows")
def test_a_program_takes_some_rows_of_a_tall_matrix(out, dtype, device, monkeypatch):
    monkeypatch.setattr(dense_matvec, "_PROGRAMS", 4)
    layer, x = linear(20, out, dtype, device, bias=True), random(1, 20, dtype=dtype, device=device, seed=9)
    assert_product(DenseLinear(layer)(x), x, layer, device)


def test_more_rows_than_one_go_to_torch(device):
    layer = linear(20, 7, torch.float32, device, bias=True)
    x = random(2, 20, dtype=torch.float32, device=device, seed=10)
    assert torch.equal(DenseLinear(layer)(x), layer(x))


@EVERY_DTYPE
@pytest.mark.parametrize("sizes", [(6, 3), (3, 6, 4)], ids=str)
def test_projections_of_one_input_are_made_in_one_launch(sizes, dtype, device):
    layers = [DenseLinear(linear(100, out, dtype, device, bias=True)) for out in sizes]
    x = random(1, 1, 100, dtype=dtype, device=device, seed=11)
    for actual, layer in zip(multiply_row(x, layers), layers, strict=True):
        assert_product(actual, x, layer, device)


def test_projections_hand_out_what_belongs_to_their_input(device):
    first, second = (DenseLinear(linear(20, out, torch.float32, device, bias=False)) for out in (3, 4))
    share_launch([first, second], multiply_row)
    x, other = (random(1, 20, dtype=torch.float32, device=device, seed=seed) for seed in (12, 13))
    for layer, given in ((first, x), (second, other), (first, other), (first, other), (second, x), (second, x)):
        assert_product(layer(given), given, layer, device)


class Interrupted(DenseLinear):
    """Lets another thread go first when its product is looked up."""

    interrupt: Any = None

    def __hash__(self) -> int:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            interrupt()
        return id(self)


def test_a_thread_of_the_host_gets_no_product_of_another(device):
    first, second = (Interrupted(linear(20, out, torch.float32, device, bias=False)) for out in (3, 4))
    share_launch([first, second], multiply_row)
    x, other = (random(1, 20, dtype=torch.float32, device=device, seed=seed) for seed in (15, 16))
    with ThreadPoolExecutor(1) as thread:
        first(x)
        second.interrupt = lambda: thread.submit(first, other).result()
        assert_product(second(x), x, second, device)


def test_projections_remember_nothing_once_all_are_handed_out(device):
    layers = [DenseLinear(linear(20, out, torch.float32, device, bias=False)) for out in (3, 4)]
    together = share_launch(layers, multiply_row)
    x = random(1, 20, dtype=torch.float32, device=device, seed=14)
    before = [layer(x) for layer in layers]
    x.mul_(2)
    for layer, product in zip(layers, before, strict=True):
        assert torch.equal(layer(x), 2 * product)
    assert vars(together)["_input"] is None


@pytest.mark.slow
def test_every_kernel_compiles_for_a_device_and_loads_16_bytes_at_a_time(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[3] / "support/helpers/compile_kernels.py"
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2 * 15 * 2
    assert not [line for line in lines if "narrow" in line]
