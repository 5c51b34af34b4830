"""The Triton kernels against their twin: on the CUDA device if there is one, else in Triton's interpreter.

The interpreter cuts bfloat16 off where a device rounds, and cannot multiply tiles of it; those run on a device only.
"""

import os

import pytest
import torch
from builders.packed_matrices import activations, packed_matrix, packed_table
from builders.table_matrices import TABLES

from llorch.files.quant import GGMLType
from llorch.pytorch.kernels import TRAINED
from llorch.pytorch.kernels.packing import PACKERS, Kind, decode, shorten
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear, multiply_by_tiles
from llorch.pytorch.models.experts import multiply_decoded

pytest.importorskip("triton", reason="NOT RUN: triton is not installed")

from llorch.pytorch.kernels.triton import quantised
from llorch.pytorch.kernels.triton.kernels import TRITON_KERNELS
from llorch.pytorch.kernels.triton.quantised import (
    back_by_library,
    decode_to,
    multiply,
    multiply_by_decoded_tiles,
    multiply_by_library,
)
from llorch.pytorch.kernels.triton.quantised_matvec import multiply_chosen, multiply_few_rows

EVERY_TYPE = pytest.mark.parametrize("ggml_type", PACKERS, ids=lambda kind: kind.name)
SHAPES = [(1, 256), (7, 768)]  # rows are odd, and the runs of 768 columns are no power of two
TABLE_SHAPES = [
    (name, (rows, width))
    for rows, width in ((3, 96), (7, 768))
    for name, (_, group, _) in TABLES.items()
    if width % (group or width) == 0
]
NARROW = [GGMLType.Q8_0, GGMLType.Q4_0]  # their rows may be any number of runs
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of a number, at most
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
TILED = [("interpreter", torch.float32), ("interpreter", torch.float16)]
TILED += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in ULP]


@pytest.fixture(params=["interpreter", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "interpreter":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("NOT RUN: the interpreter is off where there is a device")
        return "cpu"
    return "cuda"


@pytest.fixture
def wide_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step take more columns in the interpreter, where steps are what a product costs; 24 runs are 1.5 steps."""
    if device == "cpu":
        monkeypatch.setattr(quantised, "_TILE_FLOAT32", (32, 16))
        monkeypatch.setattr(quantised, "_TILE", (64, 16))


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Sums of K terms in any order are off by K * 2^-24 of the sum of their sizes; the result is rounded once more.

    A term is w * x, or, where the kernel sums codes and minima apart, as large as the largest weight of its row.
    """
    assert actual.shape == (len(x), len(weight))
    assert actual.dtype is x.dtype
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs().sum(-1, keepdim=True) * 2 * weight.double().abs().amax(-1)
    assert ((actual.double() - expected).abs() <= x.shape[1] * 2.0**-24 * size + ULP[x.dtype] * expected.abs()).all()


@pytest.mark.slow_cases("interpreter-*-2-*")
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EVERY_TYPE
def test_few_rows_are_multiplied_straight_from_the_blocks(ggml_type, shape, rows, dtype, device):
    n_out, n_in = shape
    fields, x = packed_matrix(ggml_type, n_out, n_in, device), activations(rows, n_in, dtype, device)
    bias = torch.linspace(-1, 1, n_out).to(device, dtype) if rows > 1 else None
    actual = multiply_few_rows(x, fields, ggml_type, bias)
    assert actual.device.type == x.device.type
    assert_close(actual, x, decode(fields, ggml_type), bias)


@pytest.mark.parametrize("n_inputs", [1, 3], ids=lambda n_inputs: f"{n_inputs} inputs of 3 choices")
@EVERY_TYPE
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(ggml_type, n_inputs, device):
    fields, x = packed_matrix(ggml_type, 5 * 2, 256, device), activations(2 * n_inputs, 256, torch.float32, device)
    ids = torch.tensor([4, 0, 2, 2, 1, 4], device=device)
    for multiply_some in (multiply_chosen, multiply_decoded):
        actual = multiply_some(x, ids, fields, ggml_type, 5)
        for made, row, expert in zip(actual, x.repeat_interleave(3 // n_inputs, 0), ids, strict=True):
            assert_close(made[None], row[None], decode(fields, ggml_type)[2 * expert : 2 * expert + 2], None)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("n_in", [32, 96, 4896])
@pytest.mark.parametrize("ggml_type", NARROW, ids=lambda kind: kind.name)
def test_rows_of_any_number_of_runs_are_multiplied(ggml_type, n_in, device):
    fields, x = packed_matrix(ggml_type, 3, n_in, device), activations(2, n_in, torch.float32, device)
    weight = decode(fields, ggml_type)
    assert_close(multiply_few_rows(x, fields, ggml_type, None), x, weight, None)
    assert_close(multiply_by_decoded_tiles(x, fields, ggml_type, None), x, weight, None)
    assert torch.equal(decode_to(fields, ggml_type, torch.float32), weight)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize(("device", "dtype"), TILED, ids=str, indirect=["device"])
@pytest.mark.parametrize("rows", [5, 17, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EVERY_TYPE
def test_some_rows_are_multiplied_by_tiles_decoded_to_their_dtype(ggml_type, shape, rows, dtype, device):
    n_out, n_in = shape
    fields, x = packed_matrix(ggml_type, n_out, n_in, device), activations(rows, n_in, dtype, device)
    bias = torch.linspace(-1, 1, n_out).to(device, dtype) if rows > 5 else None
    assert_close(multiply_by_decoded_tiles(x, fields, ggml_type, bias), x, decode(fields, ggml_type).to(dtype), bias)


@pytest.mark.parametrize(("device", "dtype"), TILED, ids=str, indirect=["device"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EVERY_TYPE
def test_matrix_is_decoded_to_the_bits_of_the_torch_decoder(ggml_type, shape, dtype, device):
    fields = packed_matrix(ggml_type, shape[0], shape[1], device)
    actual, expected = decode_to(fields, ggml_type, dtype), decode(fields, ggml_type).to(dtype)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("name", "shape"), TABLE_SHAPES, ids=str)
def test_table_is_decoded_to_the_bits_of_the_torch_decoder(name, shape, device):
    n_out, n_in = shape
    fields, table = packed_table(name, n_out, n_in, device)
    actual, expected = decode_to(fields, table, torch.float32), decode(fields, table)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.slow_cases("interpreter-*-2")
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", TABLES)
def test_few_rows_are_multiplied_by_a_table(name, rows, device):
    fields, table = packed_table(name, 7, 768, device)
    x, bias = activations(rows, 768, torch.float32, device), torch.linspace(-1, 1, 7).to(device)
    assert_close(multiply(x, fields, table, bias), x, decode(fields, table), bias)


@pytest.mark.slow_cases("interpreter-*.float16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_one_row_in_half_precision_is_multiplied_by_a_table(name, dtype, device):
    fields, table = packed_table(name, 7, 768, device)
    x = activations(1, 768, dtype, device)
    assert_close(multiply(x, fields, table, None), x, decode(fields, table), None)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("name", ["AWQ", "MLX 8", "NVFP4", "FP8"])
def test_scales_of_16_bits_give_the_products_of_the_same_numbers_in_32(name, rows, device):
    fields, table = packed_table(name, 7, 768, device)
    rounded = {
        key: field.bfloat16().float() if field.dtype is torch.float32 else field for key, field in fields.items()
    }
    short, x = shorten(rounded), activations(rows, 768, torch.float32, device)
    assert {field.dtype for key, field in short.items() if key != "codes"} == {torch.bfloat16}
    assert torch.equal(multiply(x, short, table, None), multiply(x, rounded, table, None))


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype", "ways"),
    [
        ("Q4_K", BF16, {1: multiply_few_rows, 2: multiply_by_decoded_tiles, 65: multiply_by_library}),
        ("Q4_K", F32, {2: multiply_few_rows, 32: multiply_by_decoded_tiles, 33: multiply_by_library}),
        ("Q4_K", torch.float64, {1: multiply_by_tiles}),
        ("AWQ", BF16, {2: multiply_few_rows, 64: multiply_by_decoded_tiles, 65: multiply_by_library}),
        ("NF4", BF16, {2: multiply_few_rows, 3: multiply_by_library}),
        ("NVFP4", BF16, {2: multiply_few_rows, 3: multiply_by_library}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_number_of_rows_selects_the_fastest_kernel(name, dtype, ways):
    kind = TABLES[name][0] if name in TABLES else GGMLType[name]
    assert {rows: quantised.fastest_way(rows, dtype, kind) for rows in ways} == ways


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize(("device", "dtype"), TILED, ids=str, indirect=["device"])
@pytest.mark.parametrize("name", TABLES)
def test_some_rows_are_multiplied_by_tiles_of_a_table(name, dtype, device):
    fields, table = packed_table(name, 7, 768, device)
    x = activations(5, 768, dtype, device)
    assert_close(multiply_by_decoded_tiles(x, fields, table, None), x, decode(fields, table).to(dtype), None)


@pytest.mark.parametrize("name", TABLES)
def test_product_with_a_table_subtracts_no_large_sums(name, device):
    fields, table = packed_table(name, 7, 768, device)
    x, weight = activations(1, 768, torch.float32, device) + 4, decode(fields, table)
    expected = x.double() @ weight.double().T
    errors = [float((y - expected).norm() / expected.norm()) for y in (multiply(x, fields, table, None), x @ weight.T)]
    assert errors[0] < max(2 * errors[1], 2e-7)


@pytest.mark.parametrize("name", TABLES)
def test_each_row_is_multiplied_by_the_table_of_its_expert(name, device):
    fields, table = packed_table(name, 5 * 2, 768, device)
    x, ids = activations(2, 768, torch.float32, device), torch.tensor([4, 0, 2, 1], device=device)
    actual = multiply_chosen(x, ids, fields, table, 5)
    for made, row, expert in zip(actual, x.repeat_interleave(2, 0), ids, strict=True):
        assert_close(made[None], row[None], decode(fields, table)[2 * expert : 2 * expert + 2], None)


@pytest.mark.slow_cases("interpreter-1", "interpreter-2", "interpreter-3", "interpreter-32")
@pytest.mark.parametrize("rows", [1, 2, 3, 32, 33])
def test_every_number_of_rows_has_a_kernel(rows, device):
    fields, x = packed_matrix(GGMLType.Q4_K, 40, 256, device), activations(rows, 256, torch.float32, device)
    bias = torch.linspace(-1, 1, 40).to(device)
    assert_close(multiply(x, fields, GGMLType.Q4_K, bias), x, decode(fields, GGMLType.Q4_K), bias)


def test_a_matrix_larger_than_the_scratch_is_multiplied_in_parts(device, monkeypatch):
    monkeypatch.setattr(quantised, "SCRATCH", 9 * 256)
    fields, x = packed_matrix(GGMLType.Q6_K, 40, 256, device), activations(300, 256, torch.float32, device)
    bias = torch.linspace(-1, 1, 40).to(device)
    assert_close(multiply(x, fields, GGMLType.Q6_K, bias), x, decode(fields, GGMLType.Q6_K), bias)


def test_float64_is_multiplied_in_float64(device):
    fields, x = packed_matrix(GGMLType.Q4_0, 5, 256, device), activations(1, 256, torch.float64, device)
    expected = x @ decode(fields, GGMLType.Q4_0).double().T
    torch.testing.assert_close(multiply(x, fields, GGMLType.Q4_0, None), expected, rtol=1e-13, atol=1e-13)


def assert_trained(fields: dict[str, torch.Tensor], kind: Kind, rows: int, dtype: torch.dtype, device: str) -> None:
    """Both products are with the matrix that the reference decodes and rounds to the dtype, the first to the bit."""
    plain, ours = (
        QuantisedLinear(fields, kind),
        TRITON_KERNELS[f"{TRAINED}packed {kind.name}"](QuantisedLinear(fields, kind)),
    )
    x, grad = (activations(rows, n, dtype, device) for n in (plain.in_features, plain.out_features))
    made = ours(x.requires_grad_())
    assert torch.equal(made, plain(x))
    (actual,) = torch.autograd.grad(made, x, grad)
    assert_close(actual, grad, decode(fields, kind).to(dtype).T, None)


@pytest.mark.parametrize(("device", "dtype"), TILED, ids=str, indirect=["device"])
@pytest.mark.parametrize("rows", [1, 70])
@EVERY_TYPE
def test_product_and_gradient_use_the_matrix_of_the_torch_decoder(ggml_type, rows, dtype, device):
    assert_trained(packed_matrix(ggml_type, 7, 768, device), ggml_type, rows, dtype, device)


@pytest.mark.parametrize(("device", "dtype"), TILED, ids=str, indirect=["device"])
@pytest.mark.parametrize("name", TABLES)
def test_product_and_gradient_use_the_table_of_the_torch_decoder(name, dtype, device):
    fields, table = packed_table(name, 7, 768, device)
    assert_trained(fields, table, 5, dtype, device)


@pytest.mark.parametrize(("device", "dtype"), TILED[1:], ids=str, indirect=["device"])
def test_parts_of_a_gradient_are_summed_in_float32(dtype, device, monkeypatch):
    """The product of each part is rounded once, and the sum once: two roundings, however many parts there are."""
    monkeypatch.setattr(quantised, "SCRATCH", 2 * 256 + 1)
    fields, grad = packed_matrix(GGMLType.Q8_0, 151, 256, device), activations(6, 151, dtype, device)
    expected = grad.double() @ decode(fields, GGMLType.Q8_0).to(dtype).double()
    actual = back_by_library(grad, fields, GGMLType.Q8_0)
    assert actual.dtype is dtype
    assert (actual.double() - expected).norm() < max(ULP[dtype], 1e-6) * expected.norm()


@pytest.mark.parametrize("field", ["codes", "scales", "d", "dmin"])
def test_flipped_bit_in_any_field_is_detected(field, device):
    fields, x = packed_matrix(GGMLType.Q4_K, 3, 256, device), activations(1, 256, torch.float32, device)
    weight = decode(fields, GGMLType.Q4_K)
    fields[field].view(torch.uint8)[1, 0] ^= 0x10
    with pytest.raises(AssertionError):
        assert_close(multiply_few_rows(x, fields, GGMLType.Q4_K, None), x, weight, None)
