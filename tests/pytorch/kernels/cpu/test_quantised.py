import numpy as np
import pytest
import torch
from builders.packed_matrices import packed_table
from builders.table_matrices import TABLES
from helpers.kernel_tolerances import distance
from torch import nn
from torch.nn.functional import linear

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.judging.expectations.quantised_models import random_blocks
from llorch.ops.compiled.library import library
from llorch.pytorch.kernels.cpu.quantised import (
    FEW,
    HALF,
    CpuQuantisedLinear,
    TrainedQuantisedLinear,
)
from llorch.pytorch.kernels.packing import CPU_BLOCK_TYPES, HALF_TYPES, decode, file_fields

KINDS = (*CPU_BLOCK_TYPES, *HALF_TYPES)

ROWS = [1, 3, FEW, FEW + 1, 40]
OUT = 70
EVERY_KIND = pytest.mark.parametrize("kind", [*KINDS, *TABLES], ids=lambda kind: getattr(kind, "name", kind))
SHAPES = [
    (name, width) for width in (192, 768) for name, (_, group, _) in TABLES.items() if width % (group or width) == 0
]


def layer(kind: GGMLType | str, dtype: torch.dtype, *, width: int = 768, bias: bool = True) -> CpuQuantisedLinear:
    """Make a layer of random blocks of a ggml type, or of a table by its name."""
    if isinstance(kind, str):
        fields, packed_kind = packed_table(kind, OUT, width)
    else:
        blocks = random_blocks(kind, OUT * width // BLOCK_SIZES[kind][0], key=kind.name)
        fields, packed_kind = file_fields(torch.from_numpy(blocks.reshape(OUT, -1)), kind), kind
    compiled = library()
    assert compiled is not None
    return CpuQuantisedLinear(fields, packed_kind, random_bias(dtype) if bias else None, compiled)


def random_bias(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.linspace(-1, 1, OUT)).to(dtype), requires_grad=False)


def inputs(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, width))).to(dtype)


def reference(x: torch.Tensor, kernel: CpuQuantisedLinear) -> torch.Tensor:
    weight = decode(kernel.fields, kernel.ggml_type).double()
    return linear(x.double(), weight, None if kernel.bias is None else kernel.bias.double())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ggml_type", KINDS, ids=lambda kind: kind.name)
def test_float32_products_are_exact_to_float32_rounding(ggml_type, rows, bias):
    kernel = layer(ggml_type, torch.float32, bias=bias)
    x = inputs(rows, 768, torch.float32)
    assert distance(kernel(x), reference(x, kernel)) < 1e-6


@pytest.mark.parametrize("rows", ROWS)
@EVERY_KIND
def test_bfloat16_products_are_no_worse_than_those_of_torch_with_a_decoded_matrix(kind, rows):
    kernel, x = layer(kind, torch.bfloat16), inputs(rows, 768, torch.bfloat16)
    decoded, expected = decode(kernel.fields, kernel.ggml_type).bfloat16(), reference(x, kernel)
    assert distance(kernel(x), expected) <= 1.01 * distance(linear(x, decoded, kernel.bias), expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@EVERY_KIND
def test_decoding_has_the_bits_of_the_torch_decoder(kind, dtype):
    kernel = layer(kind, dtype)
    actual = torch.empty(OUT - 3, 768, dtype=dtype)
    kernel.library.llorch_decode(*kernel.matrix_of(dtype), actual.data_ptr(), 3, OUT - 3, 768)
    assert torch.equal(as_bytes(actual), as_bytes(decode(kernel.fields, kernel.ggml_type)[3:].to(dtype)))


@pytest.mark.parametrize(
    "ggml_type", [kind for kind in KINDS if BLOCK_SIZES[kind][0] <= 32], ids=lambda kind: kind.name
)
def test_rows_of_an_odd_number_of_blocks_are_summed_to_the_end(ggml_type):
    kernel = layer(ggml_type, torch.float32, width=9 * 32)
    x = inputs(1, 9 * 32, torch.float32)
    assert distance(kernel(x), reference(x, kernel)) < 1e-6


def test_product_of_many_tiles_equals_one_tile(monkeypatch):
    monkeypatch.setattr("llorch.pytorch.kernels.cpu.quantised.TILE", 768 * 8)
    kernel = layer(next(iter(KINDS)), torch.float32)
    x = inputs(FEW + 1, 768, torch.float32)
    assert distance(kernel(x), reference(x, kernel)) < 1e-6


def test_leading_axes_and_strides_of_the_input_do_not_matter():
    kernel = layer(next(iter(KINDS)), torch.float32, width=32 * 8)
    x = inputs(2 * 256, 3, torch.float32).view(2, 256, 3).transpose(1, 2)  # (2, 3, 256), not contiguous
    actual = kernel(x)
    assert actual.shape == (2, 3, OUT)
    assert distance(actual, reference(x, kernel)) < 1e-6


def product_sizes(x: torch.Tensor, kernel: CpuQuantisedLinear) -> torch.Tensor:
    """Bound the terms of a product; values and offsets are summed apart."""
    weight = decode(kernel.fields, kernel.ggml_type).double().abs().amax(-1)
    return x.double().abs().sum(-1, keepdim=True) * 2 * weight + 1


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "width"), SHAPES)
def test_float32_products_with_a_table_are_exact_to_float32_rounding(name, rows, width):
    kernel = layer(name, torch.float32, width=width)
    x = inputs(rows, width, torch.float32)
    assert ((kernel(x).double() - reference(x, kernel)).abs() <= width * 2.0**-24 * product_sizes(x, kernel)).all()
    assert distance(kernel(x), reference(x, kernel)) < 1e-6


def with_gradients(kernel: CpuQuantisedLinear) -> TrainedQuantisedLinear:
    return TrainedQuantisedLinear(kernel.fields, kernel.ggml_type, kernel.bias, kernel.library)


def assert_trained(kernel: CpuQuantisedLinear, rows: int, dtype: torch.dtype) -> None:
    """Both products are with the matrix that the reference decodes and rounds to the dtype."""
    ours, weight = with_gradients(kernel), decode(kernel.fields, kernel.ggml_type).to(dtype).double()
    x, grad = inputs(rows, kernel.in_features, dtype).requires_grad_(), inputs(rows + 1, OUT, dtype)[:rows]
    made = ours(x[None])[0]
    (actual,) = torch.autograd.grad(made, x, grad)
    assert (made.dtype, actual.dtype, actual.shape) == (dtype, dtype, x.shape)
    bias = None if kernel.bias is None else kernel.bias.double()
    for number, expected in (
        (made.detach(), linear(x.detach().double(), weight, bias)),
        (actual, grad.double() @ weight),
    ):
        assert distance(number, expected) < (1e-6 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("ggml_type", KINDS, ids=lambda kind: kind.name)
def test_product_and_gradient_use_the_matrix_of_the_torch_decoder(ggml_type, rows, dtype):
    assert_trained(layer(ggml_type, dtype), rows, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_product_and_gradient_use_the_table_of_the_torch_decoder(name, dtype):
    assert_trained(layer(name, dtype), 5, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradient_of_many_tiles_equals_one_tile(dtype, monkeypatch):
    monkeypatch.setattr("llorch.pytorch.kernels.cpu.quantised.TILE", 768 * 8)
    assert_trained(layer(next(iter(KINDS)), dtype), 5, dtype)


def as_bytes(field: torch.Tensor) -> torch.Tensor:
    """The bytes of a field, so that NaN is equal to itself."""
    return field.view(torch.uint8)
