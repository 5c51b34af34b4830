"""The compiled pass over stored codes and blocks, against the NumPy readers and the packing in torch."""

import numpy as np
import pytest
import torch
from builders.quantised_folders import FOLDERS

from llorch.files import open_weights
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.matrix import CodesOf, Order, QuantisedMatrix, StoredPart
from llorch.pytorch import stored_kinds
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.kernels.cpu.stored_codes import pack_blocks, packed_codes
from llorch.pytorch.kernels.packing import PACKERS, Table, join_four_bits, pack
from llorch.pytorch.stored_kinds import kind_of, pack_stored

ORDERS: list[tuple[Order, int]] = [
    ("rows", 4), ("rows", 8), ("high first", 4), ("columns", 4), ("columns", 8), ("awq", 4),
]  # fmt: skip
SHAPES = ((8, 32), (24, 96), (40, 544), (136, 160), (1032, 64))  # less than a tile, a rest of a tile, of a block


def bits_of(field: torch.Tensor) -> torch.Tensor:
    """The bytes of a field, so that NaN is equal to itself."""
    return field.view(torch.uint8)


def stored(order: Order, bits: int, out: int, n_in: int) -> tuple[CodesOf, StoredPart]:
    """Random codes, at an odd address."""
    dtype, shape = {
        "rows": ("U8", (out, n_in * bits // 8)),
        "high first": ("U8", (out * n_in // 2, 1)),
        "columns": ("I32", (n_in * bits // 32, out)),
        "awq": ("I32", (n_in, out // 8)),
    }[order]
    raw = np.random.default_rng(out * n_in).integers(0, 256, out * n_in * bits // 8 + 1, dtype=np.uint8)[1:]
    return CodesOf("codes", bits, (out, n_in), order), StoredPart("w", dtype, shape, raw)


@pytest.mark.parametrize(("order", "bits"), ORDERS)
def test_packed_codes_of_every_order_have_the_bits_of_the_reference(order: Order, bits: int):
    compiled = library()
    if compiled is None:
        pytest.skip("NOT RUN: no C compiler")
    for out, n_in in SHAPES if order == "awq" else (*SHAPES, (5, 96)):
        codes, part = stored(order, bits, out, n_in)
        bytes_of_codes = torch.from_numpy(codes({"codes": part}, slice(0, out)).copy())
        expected = join_four_bits(bytes_of_codes) if bits == 4 else bytes_of_codes
        actual = packed_codes(codes, part, compiled)
        assert actual is not None
        assert torch.equal(actual, expected), (out, n_in)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40, 64)], ids=str)  # the last one is shared by threads
@pytest.mark.parametrize("ggml_type", PACKERS, ids=lambda kind: kind.name)
def test_blocks_are_taken_apart_to_the_bits_of_the_reference(ggml_type: GGMLType, shape: tuple[int, int]):
    compiled = library()
    if compiled is None:
        pytest.skip("NOT RUN: no C compiler")
    rows, n_bytes = shape[0], shape[1] * BLOCK_SIZES[ggml_type][1]
    blocks = np.random.default_rng(rows).integers(0, 256, rows * n_bytes + 1, dtype=np.uint8)[1:].reshape(rows, n_bytes)
    expected = pack(torch.from_numpy(blocks.copy()), ggml_type)
    actual = {name: torch.empty_like(field) for name, field in expected.items()}
    pack_blocks(blocks, ggml_type, actual, compiled)
    assert all(torch.equal(bits_of(actual[name]), bits_of(field)) for name, field in expected.items())


def test_packed_codes_of_three_bits_are_left_to_the_reference():
    compiled = library()
    if compiled is None:
        pytest.skip("NOT RUN: no C compiler")
    codes = CodesOf("codes", 3, (8, 32))
    assert packed_codes(codes, StoredPart("w", "U32", (8, 3), np.zeros(96, np.uint8)), compiled) is None


@pytest.mark.parametrize(("order", "bits"), ORDERS)
@pytest.mark.parametrize("n_out", [24, 56], ids=["too long", "too short"])
def test_a_part_of_another_size_than_its_codes_is_left_to_the_reference(order: Order, bits: int, n_out: int):
    compiled = library()
    if compiled is None:
        pytest.skip("NOT RUN: no C compiler")
    _, part = stored(order, bits, 40, 64)
    assert packed_codes(CodesOf("codes", bits, (n_out, 64), order), part, compiled) is None


@pytest.mark.parametrize("folder", ["awq-gemm", "bnb-nf4", "gptq-4bit", "gptq-8bit", "mlx-4bit", "mlx-8bit"])
def test_pack_stored_without_a_compiler_gives_equal_fields(folder: str, monkeypatch: pytest.MonkeyPatch):
    weights = open_weights(FOLDERS / folder)
    name = next(name for name in weights if isinstance(weights.as_stored(name), QuantisedMatrix))
    kind, matrix = kind_of(weights, name), weights.as_stored(name)
    assert isinstance(kind, Table)
    assert isinstance(matrix, QuantisedMatrix)
    compiled = pack_stored(matrix, kind)
    monkeypatch.setattr(stored_kinds, "_compiled_pass", stored_kinds._compiled_pass.__wrapped__)
    monkeypatch.setattr(stored_kinds, "find_compiler", lambda: None)
    monkeypatch.setattr(stored_kinds, "library", lambda: pytest.fail("warns that tokens are slow, also on a GPU"))
    plain = pack_stored(matrix, kind)
    assert compiled.keys() == plain.keys()
    assert all(torch.equal(compiled[field], plain[field]) for field in plain)


def test_pack_stored_of_picked_rows_packs_these_rows():
    weights = open_weights(FOLDERS / "gptq-4bit")
    name = next(name for name in weights if isinstance(weights.as_stored(name), QuantisedMatrix))
    kind, matrix = kind_of(weights, name), weights.as_stored(name)
    assert isinstance(kind, Table)
    assert isinstance(matrix, QuantisedMatrix)
    rows = np.array([5, 2, 7])
    whole, some = pack_stored(matrix, kind), pack_stored(matrix.picked(rows), kind)
    assert all(torch.equal(some[field], whole[field][rows]) for field in whole)
