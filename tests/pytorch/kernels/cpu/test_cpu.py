import numpy as np
import pytest
import torch
from helpers.kernel_tolerances import distance
from helpers.refusals import refuses
from torch import nn
from torch.nn.functional import linear

from llorch.ops.compiled.library import library
from llorch.pytorch.kernels.cpu import linear as cpu_linear
from llorch.pytorch.kernels.cpu.linear import CpuLinear

SHAPES = [(96, 64), (7, 37), (260, 896)]  # rows and widths that fill no whole vector, too
ROWS = [1, 3, 8, 9, 40]


def parameter(*shape: int, dtype: torch.dtype, seed: int) -> nn.Parameter:
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return nn.Parameter(torch.from_numpy(numbers).to(dtype), requires_grad=False)


def layer(shape: tuple[int, int], dtype: torch.dtype, *, bias: bool = True, compiled: bool = True) -> CpuLinear:
    weight, out = parameter(*shape, dtype=dtype, seed=1), shape[0]
    return CpuLinear(weight, parameter(out, dtype=dtype, seed=2) if bias else None, library() if compiled else None)


def reference(x: torch.Tensor, kernel: CpuLinear) -> torch.Tensor:
    return linear(x.double(), kernel.weight.double(), None if kernel.bias is None else kernel.bias.double())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_products_are_exact_to_float32_rounding(shape, rows, compiled, bias):
    kernel = layer(shape, torch.float32, bias=bias, compiled=compiled)
    x = parameter(rows, shape[1], dtype=torch.float32, seed=3)
    actual = kernel(x)
    assert actual.dtype == torch.float32
    assert distance(actual, reference(x, kernel)) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_products_are_no_worse_than_those_of_torch(shape, rows, bias):
    kernel = layer(shape, torch.bfloat16, bias=bias)
    x = parameter(rows, shape[1], dtype=torch.bfloat16, seed=3)
    actual, expected = kernel(x), reference(x, kernel)
    assert actual.dtype == torch.bfloat16
    assert distance(actual, expected) <= 1.01 * distance(linear(x, kernel.weight, kernel.bias), expected)


def test_a_few_bfloat16_rows_are_the_exact_sums_rounded_once():
    kernel = layer((260, 896), torch.bfloat16)
    x = parameter(2, 896, dtype=torch.bfloat16, seed=3)
    exact = reference(x, kernel)
    off = (kernel(x).double() - exact).abs() / exact.abs()
    assert off.max() <= 2**-8 * 1.001  # half a step of eight bits, and the float32 sum under it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_axes_and_strides_of_the_input_do_not_matter(dtype):
    kernel = layer((96, 64), dtype)
    x = parameter(2, 64, 3, dtype=dtype, seed=3).transpose(1, 2)  # (2, 3, 64), not contiguous
    actual = kernel(x)
    assert actual.shape == (2, 3, 96)
    assert distance(actual, reference(x, kernel)) < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_unsupported_onednn_products_use_fallback_kernels(dtype, bias, monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn_multiplies", lambda dtype: False)
    monkeypatch.setattr(cpu_linear, "TILE", 100 * 896)  # so that 260 rows of weights are three tiles
    kernel = layer((260, 896), dtype, bias=bias)
    x = parameter(40, 896, dtype=dtype, seed=3)
    assert kernel(x).dtype == dtype
    assert distance(kernel(x), reference(x, kernel)) <= 1.01 * max(
        distance(linear(x, kernel.weight, kernel.bias), reference(x, kernel)), 1e-7
    )


def test_onednn_products_are_probed(monkeypatch):
    def refuse(*args):
        raise RuntimeError("could not create a primitive descriptor")

    assert cpu_linear.onednn_multiplies.__wrapped__(torch.float32)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    assert not cpu_linear.onednn_multiplies.__wrapped__(torch.float32)


def test_infinity_and_nan_come_through_a_bfloat16_product():
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    actual = layer((96, 64), torch.bfloat16, bias=False)(x)
    assert actual[0].isinf().all()
    assert actual[1].isnan().all()


def test_an_input_of_another_dtype_is_refused():
    kernel = layer((96, 64), torch.float32)
    with refuses(ValueError, expected="torch.float32", got="torch.bfloat16"):
        kernel(torch.zeros(1, 64, dtype=torch.bfloat16))
