import ctypes

import numpy as np
import pytest
import torch
from builders.packed_matrices import TABLES, packed_table
from builders.quantised_folders import FOLDERS
from helpers.kernel_tolerances import distance
from torch import nn
from torch.nn.functional import linear

from llorch.files import open_weights
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.matrix import Order, QuantisedMatrix, StoredPart, Unpacker
from llorch.judging.expectations.quantised_models import random_blocks
from llorch.ops.compiled.library import library
from llorch.pytorch import stored_kinds
from llorch.pytorch.kernels.cpu.quantised import (
    _SHIFTED,
    FEW,
    HALF,
    KINDS,
    CpuQuantisedLinear,
    TrainedQuantisedLinear,
    pack_blocks,
    packed_codes,
    shared_by_rows,
)
from llorch.pytorch.kernels.packing import PACKERS, Table, decode, join_four_bits, pack
from llorch.pytorch.stored_kinds import kind_of, pack_stored

ROWS = [1, 3, FEW, FEW + 1, 40]
OUT = 70
EVERY_KIND = pytest.mark.parametrize("kind", [*KINDS, *TABLES], ids=lambda kind: getattr(kind, "name", kind))
SHAPES = [
    (name, width) for width in (192, 768) for name, (_, group, _) in TABLES.items() if width % (group or width) == 0
]


@pytest.fixture
def compiled() -> ctypes.CDLL:
    if (compiled := library()) is None:
        pytest.skip("NOT RUN: no C compiler")
    return compiled


def layer(kind: GGMLType | str, dtype: torch.dtype, *, width: int = 768, bias: bool = True) -> CpuQuantisedLinear:
    """Make a layer of random blocks of a ggml type, or of a table by its name."""
    if isinstance(kind, str):
        fields, packed_kind = packed_table(kind, OUT, width)
    else:
        blocks = random_blocks(kind, OUT * width // BLOCK_SIZES[kind][0], key=kind.name)
        fields, packed_kind = pack(torch.from_numpy(blocks.reshape(OUT, -1)), kind), kind
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


@pytest.mark.parametrize("ggml_type", list(KINDS)[:3], ids=lambda kind: kind.name)
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


@pytest.mark.parametrize(("zero", "shifts"), [(-8.0, True), (8.0, True), (0.5, False), (9.0, False), (-9.0, False)])
def test_zero_points_shift_a_list_of_integers_where_it_is_long_enough(zero, shifts, compiled):
    fields, table = packed_table("W4 asym", OUT, 768)
    fields["zero"][OUT // 2] = zero
    assert (int(shared_by_rows(table, fields)[1:2].view(torch.int32)) == _SHIFTED) is shifts
    kernel, x = CpuQuantisedLinear(fields, table, random_bias(torch.float32), compiled), inputs(1, 768, torch.float32)
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


ORDERS: list[tuple[Order, int]] = [
    ("rows", 4), ("rows", 8), ("high first", 4), ("columns", 4), ("columns", 8), ("awq", 4),
]  # fmt: skip
CODE_SHAPES = ((8, 32), (24, 96), (40, 544), (136, 160), (1032, 64))  # less than a tile, a rest of a tile, of a block


def as_bytes(field: torch.Tensor) -> torch.Tensor:
    """The bytes of a field, so that NaN is equal to itself."""
    return field.view(torch.uint8)


def random_packed_codes(order: Order, bits: int, out: int, n_in: int) -> tuple[Unpacker, StoredPart]:
    """Random codes, at an odd address."""
    dtype, shape = {
        "rows": ("U8", (out, n_in * bits // 8)),
        "high first": ("U8", (out * n_in // 2, 1)),
        "columns": ("I32", (n_in * bits // 32, out)),
        "awq": ("I32", (n_in, out // 8)),
    }[order]
    raw = np.random.default_rng(out * n_in).integers(0, 256, out * n_in * bits // 8 + 1, dtype=np.uint8)[1:]
    return Unpacker("codes", bits, (out, n_in), order), StoredPart("w", dtype, shape, raw)


@pytest.mark.parametrize(("order", "bits"), ORDERS)
def test_packed_codes_of_every_order_have_the_bits_of_the_reference(order: Order, bits: int, compiled: ctypes.CDLL):
    for out, n_in in CODE_SHAPES if order == "awq" else (*CODE_SHAPES, (5, 96)):
        codes, part = random_packed_codes(order, bits, out, n_in)
        bytes_of_codes = torch.from_numpy(codes({"codes": part}, slice(0, out)).copy())
        expected = join_four_bits(bytes_of_codes) if bits == 4 else bytes_of_codes
        actual = packed_codes(codes, part, compiled)
        assert actual is not None
        assert torch.equal(actual, expected), (out, n_in)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40, 64)], ids=str)  # the last one is shared by threads
@pytest.mark.parametrize("ggml_type", PACKERS, ids=lambda kind: kind.name)
def test_unpacked_blocks_have_the_bits_of_the_reference(ggml_type, shape, compiled: ctypes.CDLL):
    rows, n_bytes = shape[0], shape[1] * BLOCK_SIZES[ggml_type][1]
    blocks = np.random.default_rng(rows).integers(0, 256, rows * n_bytes + 1, dtype=np.uint8)[1:].reshape(rows, n_bytes)
    expected = pack(torch.from_numpy(blocks.copy()), ggml_type)
    actual = {name: torch.empty_like(field) for name, field in expected.items()}
    pack_blocks(blocks, ggml_type, actual, compiled)
    assert all(torch.equal(as_bytes(actual[name]), as_bytes(field)) for name, field in expected.items())


def test_packed_codes_of_three_bits_are_left_to_the_reference(compiled: ctypes.CDLL):
    codes = Unpacker("codes", 3, (8, 32))
    assert packed_codes(codes, StoredPart("w", "U32", (8, 3), np.zeros(96, np.uint8)), compiled) is None


@pytest.mark.parametrize(("order", "bits"), ORDERS)
@pytest.mark.parametrize("n_out", [24, 56], ids=["too long", "too short"])
def test_a_part_of_another_size_than_its_codes_is_left_to_the_reference(order: Order, bits: int, n_out: int, compiled):
    _, part = random_packed_codes(order, bits, 40, 64)
    assert packed_codes(Unpacker("codes", bits, (n_out, 64), order), part, compiled) is None


def first_matrix(folder: str) -> tuple[Table, QuantisedMatrix]:
    weights = open_weights(FOLDERS / folder)
    name = next(name for name in weights if isinstance(weights.as_stored(name), QuantisedMatrix))
    kind, matrix = kind_of(weights, name), weights.as_stored(name)
    assert isinstance(kind, Table)
    assert isinstance(matrix, QuantisedMatrix)
    return kind, matrix


@pytest.mark.parametrize("folder", ["awq-gemm", "bnb-nf4", "gptq-4bit", "gptq-8bit", "mlx-4bit", "mlx-8bit"])
def test_pack_stored_without_a_compiler_gives_equal_fields(folder: str, monkeypatch: pytest.MonkeyPatch):
    kind, matrix = first_matrix(folder)
    compiled = pack_stored(matrix, kind)
    monkeypatch.setattr(stored_kinds, "_compiled_pass", stored_kinds._compiled_pass.__wrapped__)
    monkeypatch.setattr(stored_kinds, "find_compiler", lambda: None)
    monkeypatch.setattr(stored_kinds, "library", lambda: pytest.fail("warns that tokens are slow, also on a GPU"))
    plain = pack_stored(matrix, kind)
    assert compiled.keys() == plain.keys()
    assert all(torch.equal(compiled[field], plain[field]) for field in plain)


def test_pack_stored_of_picked_rows_packs_these_rows():
    kind, matrix = first_matrix("gptq-4bit")
    rows = np.array([5, 2, 7])
    whole, some = pack_stored(matrix, kind), pack_stored(matrix.picked(rows), kind)
    assert all(torch.equal(some[field], whole[field][rows]) for field in whole)
