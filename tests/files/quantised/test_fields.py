"""Fields of quantised folders' matrices; `tests/files/test_compiled.py` checks that C decodes them to the same bits."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS
from builders.table_matrices import TABLES, reader, table_matrix

from llorch.files import open_weights
from llorch.files.quantised import fields
from llorch.files.quantised.codes import E4M3, integers
from llorch.files.quantised.fields import (
    Table,
    code_table,
    count_bytes,
    group_order,
    has_finite_numbers,
    join_four_bits,
    pack_table,
)
from llorch.files.quantised.matrix import Order, QuantisedMatrix, Recipe, StoredPart, Unpacker


@cache
def first_matrix(folder: str) -> QuantisedMatrix:
    weights = open_weights(FOLDERS / folder)
    return next(m for m in map(weights.as_stored, weights) if isinstance(m, QuantisedMatrix))


def with_recipe(matrix: QuantisedMatrix, **changes: Any) -> QuantisedMatrix:
    return replace(matrix, recipe=replace(matrix.recipe, **changes))


def table_of(matrix: QuantisedMatrix) -> Table:
    table = code_table(matrix)
    assert table is not None
    return table


@pytest.mark.parametrize("name", TABLES)
def test_table_has_the_numbers_and_factors_of_the_matrix(name: str):
    assert table_of(table_matrix(name, 70, 192 if TABLES[name][1] != 128 else 256)) == TABLES[name][0]


def test_equal_zero_points_are_part_of_the_table():
    table = table_of(with_recipe(first_matrix("awq-gemm"), zero=reader(np.full((64, 2), 3, np.float32))))
    assert not table.has_zeros
    np.testing.assert_array_equal(table.numbers, integers(4, offset=3))


@pytest.mark.parametrize("group", [24, 40])
def test_groups_that_sixteen_does_not_divide_have_no_table(group: int):
    assert code_table(with_recipe(first_matrix("gptq-4bit"), group=group)) is None


def test_shorter_last_group_is_split_into_groups_that_repeat_its_scale():
    matrix = table_matrix("MLX 4", 8, 192)
    scales = np.arange(1, 17, dtype=np.float32).reshape(8, 2)
    changes = {"scale": reader(scales), "minimum": None}
    for group in (128, lambda parts: np.arange(192) // 128):
        short = with_recipe(matrix, group=group, **changes)
        np.testing.assert_array_equal(pack_table(short, table_of(short))["d"], scales[:, [0, 0, 1]])


def test_groups_of_different_sizes_have_no_table():
    group_index = np.arange(64) // 40
    group_index[5] = 1
    assert code_table(with_recipe(first_matrix("gptq-4bit"), group=lambda parts: group_index)) is None


def test_row_that_is_no_multiple_of_32_columns_has_no_table():
    assert code_table(replace(first_matrix("mlx-4bit"), shape=(64, 48))) is None


def test_zero_points_with_minima_have_no_table():
    matrix = first_matrix("awq-gemm")
    assert code_table(with_recipe(matrix, minimum=matrix.recipe.scale)) is None


def test_scattered_columns_of_a_scale_are_put_side_by_side():
    matrix = first_matrix("gptq-4bit-act-order")
    assert callable(matrix.recipe.group)
    order, group_index = group_order(matrix), matrix.recipe.group(matrix.parts)
    assert order is not None
    assert (np.diff(group_index) < 0).any()
    assert (np.diff(group_index[order]) >= 0).all()
    assert group_order(first_matrix("gptq-4bit")) is None


@pytest.mark.parametrize("folder", ["awq-gemm", "mlx-4bit", "bnb-nf4-double", "ct-fp8-dynamic", "ct-nvfp4"])
def test_predicted_bytes_hold_all_fields_and_few_more(folder: str):
    matrix = first_matrix(folder)
    table = table_of(matrix)
    n_bytes = sum(field.nbytes for field in pack_table(matrix, table).values())
    assert n_bytes <= count_bytes(matrix, table, matrix.shape[0] * matrix.shape[1]) <= 1.5 * n_bytes


ORDERS: list[tuple[Order, int]] = [
    ("rows", 4), ("rows", 8), ("high first", 4), ("columns", 4), ("columns", 8), ("awq", 4),
]  # fmt: skip
CODE_SHAPES = ((8, 32), (24, 96), (40, 544), (136, 160), (1032, 64))  # less than a tile, a rest of a tile, of a block


def random_codes(order: Order, bits: int, out: int, n_in: int) -> QuantisedMatrix:
    """Random codes, at an odd address."""
    dtype, shape = {
        "rows": ("U8", (out, n_in * bits // 8)),
        "high first": ("U8", (out * n_in // 2, 1)),
        "columns": ("I32", (n_in * bits // 32, out)),
        "awq": ("I32", (n_in, out // 8)),
    }[order]
    raw = np.random.default_rng(out * n_in).integers(0, 256, out * n_in * bits // 8 + 1, dtype=np.uint8)[1:]
    codes, parts = Unpacker("codes", bits, (out, n_in), order), {"codes": StoredPart("w", dtype, shape, raw)}
    recipe = Recipe(codes=codes, values=integers(bits), scale=reader(np.ones((out, 1), np.float32)), group=n_in)
    return replace(first_matrix("mlx-4bit"), raw=raw, shape=(out, n_in), parts=parts, recipe=recipe)


@pytest.mark.parametrize(("order", "bits"), ORDERS)
@pytest.mark.parametrize("empty", [None, np.empty], ids=["view", "copy"])
def test_packed_codes_of_every_order_have_the_bits_of_the_reference(order: Order, bits: int, empty: Any):
    for out, n_in in CODE_SHAPES if order == "awq" else (*CODE_SHAPES, (5, 96)):
        matrix = random_codes(order, bits, out, n_in)
        codes = matrix.recipe.codes(matrix.parts, slice(0, out))
        actual = pack_table(matrix, table_of(matrix), empty)["codes"]
        np.testing.assert_array_equal(actual, join_four_bits(codes) if bits == 4 else codes, err_msg=str((out, n_in)))


def test_codes_of_eight_bits_in_order_are_a_view_of_an_aligned_part():
    matrix = table_matrix("FP8", 64, 192)
    assert np.shares_memory(pack_table(matrix, table_of(matrix))["codes"], matrix.raw)
    assert not np.shares_memory(pack_table(matrix, table_of(matrix), np.empty)["codes"], matrix.raw)


def test_word_has_every_fourth_code_from_its_lowest_bits_on():
    codes = np.random.default_rng(0).integers(0, 16, (3, 64), dtype=np.uint8)
    words = join_four_bits(codes).view("<u4").reshape(3, 2, 4)
    for run in range(2):
        for element in range(32):
            word = words[:, run, element % 4]
            np.testing.assert_array_equal(word >> (element // 4 * 4) & 15, codes[:, 32 * run + element])


@pytest.mark.parametrize(("order", "bits"), ORDERS)
def test_part_with_more_than_the_codes_is_unpacked_by_the_reference(order: Order, bits: int):
    matrix = random_codes(order, bits, 40, 64)
    codes = Unpacker("codes", bits, (24, 64), order)
    shorter = with_recipe(replace(matrix, shape=(24, 64)), codes=codes)
    expected = pack_table(matrix, table_of(matrix))["codes"][:24]
    np.testing.assert_array_equal(pack_table(shorter, table_of(matrix))["codes"], expected)


@pytest.mark.parametrize("folder", ["awq-gemm", "bnb-nf4", "gptq-4bit", "gptq-8bit", "mlx-4bit", "mlx-8bit"])
def test_fields_are_the_same_without_a_compiler(folder: str, monkeypatch: pytest.MonkeyPatch):
    matrix = first_matrix(folder)
    compiled = pack_table(matrix, table_of(matrix))
    monkeypatch.setattr(fields, "find_compiler", lambda: None)
    monkeypatch.setattr(fields, "library", lambda: pytest.fail("warns that tokens are slow, also on a GPU"))
    plain = pack_table(matrix, table_of(matrix))
    assert compiled.keys() == plain.keys()
    for name, field in plain.items():
        np.testing.assert_array_equal(compiled[name], field)


@pytest.mark.parametrize("rows", [np.array([5, 2, 7]), np.arange(64)[::-1]], ids=["some", "all"])
def test_fields_of_picked_rows_are_those_rows_of_the_fields(rows: np.ndarray):
    matrix = first_matrix("gptq-4bit")
    table = table_of(matrix)
    some = pack_table(matrix.picked(rows), table)
    for name, field in pack_table(matrix, table).items():
        np.testing.assert_array_equal(some[name], field[rows])


def fields_of(codes: np.ndarray, **numbers: float) -> dict[str, np.ndarray]:
    return {"codes": codes} | {name: np.full((len(codes), 1), number, np.float32) for name, number in numbers.items()}


@pytest.mark.parametrize("index", [0, 70, -1], ids=["first chunk", "later chunk", "last"])
def test_code_of_nan_is_found(index: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fields, "_SCAN", 64)
    table, codes = Table("TABLE_8", E4M3.tobytes()), np.full((3, 64), 126, np.uint8)
    assert has_finite_numbers(fields_of(codes, d=1), table)
    codes.reshape(-1)[index] = 255
    assert not has_finite_numbers(fields_of(codes, d=1), table)


@pytest.mark.parametrize(
    ("numbers", "factors", "is_finite"),
    [
        ({"d": 1e37}, {}, True),
        ({"d": -1e38}, {}, False),
        ({"d": 1e37, "zero": -30}, {}, False),
        ({"d": 1e37, "minimum": 1.8e38}, {}, True),
        ({"d": 1e37, "minimum": -2e38}, {}, False),
        ({"d": 1e37}, {"factor": -9.0}, False),
        ({"d": 1e37}, {"factor": 9.0, "divisor": 9.0}, False),  # before the division
        ({"d": 1e37}, {"divisor": 0.1}, False),
        ({"d": np.nan}, {}, False),
    ],
)
def test_numbers_that_could_overflow_are_not_finite(numbers: Any, factors: Any, is_finite: bool):
    table = Table("TABLE_4", integers(4).tobytes(), **factors)
    assert has_finite_numbers(fields_of(np.zeros((2, 16), np.uint8), **numbers), table) is is_finite


def test_four_bits_with_a_number_that_is_not_finite_are_not_searched():
    numbers = integers(4)
    numbers[3] = np.inf
    assert not has_finite_numbers(fields_of(np.zeros((2, 16), np.uint8), d=1), Table("TABLE_4", numbers.tobytes()))
