"""Quantised matrices in blocks of ggml, against the matrices' own decoding, over all stored folders."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES

from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.files.quantised.blocks import block_type, blocks, group_size
from llorch.files.quantised.matrix import QuantisedMatrix

EXPECTED = {
    "gptq-4bit": {GGMLType.Q4_0}, "gptq-4bit-asym": {GGMLType.Q5_0}, "gptq-8bit": {GGMLType.Q8_0},
    "gptq-4bit-act-order": {None}, "awq-gemm": {GGMLType.Q5_0}, "ct-w8a8": {GGMLType.Q8_0},
    "ct-mxfp4": {GGMLType.MXFP4}, "ct-nvfp4": {None}, "ct-fp8-block": {None}, "bnb-nf4": {None}, "bnb-int8": {None},
    "mlx-4bit": {GGMLType.Q4_1}, "mlx-5bit": {GGMLType.Q5_1}, "mlx-6bit": {None},
}  # fmt: skip


def matrices(folder: str) -> Iterator[QuantisedMatrix]:
    weights = open_weights(FOLDERS / folder)
    with closing(weights.source):
        for name in weights:
            stored = weights.as_stored(name)
            if isinstance(stored, QuantisedMatrix):
                yield stored


@cache
def first(folder: str) -> QuantisedMatrix:
    return next(matrices(folder))


def scaled(matrix: QuantisedMatrix, factor: float) -> QuantisedMatrix:
    """The same codes, with other scales."""
    scale = matrix.recipe.scale
    recipe = replace(matrix.recipe, scale=lambda parts, rows: scale(parts, rows) * np.float32(factor))
    return replace(matrix, recipe=recipe)


@pytest.mark.parametrize("folder", NAMES)
def test_blocks_of_every_folder_decode_to_the_numbers_of_the_matrix(folder):
    for matrix in matrices(folder):
        kind = block_type(matrix)
        if isinstance(kind, str):
            continue
        actual, expected = blocks(matrix, kind).decode(), matrix.decode()
        assert np.array_equal(actual, expected)
        assert kind is GGMLType.MXFP4 or np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("folder", EXPECTED)
def test_block_type_is_the_smallest_one_that_fits(folder):
    kinds = (block_type(matrix) for matrix in matrices(folder))
    assert {None if isinstance(kind, str) else kind for kind in kinds} == EXPECTED[folder]


@pytest.mark.parametrize("folder", ["gptq-4bit", "mlx-4bit", "ct-mxfp4"])
@pytest.mark.parametrize("factor", [1 + 2**-14, 1e30, np.nan], ids=str)
def test_block_type_of_an_unrepresentable_scale_is_a_reason(folder, factor):
    matrix = first(folder)
    assert isinstance(block_type(matrix), GGMLType)
    assert isinstance(block_type(scaled(matrix, factor)), str)


def test_block_type_of_an_unrepresentable_minimum_is_a_reason():
    matrix = first("mlx-4bit")
    minimum = matrix.recipe.minimum
    assert minimum is not None
    recipe = replace(matrix.recipe, minimum=lambda parts, rows: minimum(parts, rows) * np.float32(1 + 2**-14))
    assert isinstance(block_type(replace(matrix, recipe=recipe)), str)


def test_groups_that_do_not_end_with_a_block_leave_no_type():
    matrix = first("gptq-4bit")
    assert isinstance(block_type(replace(matrix, recipe=replace(matrix.recipe, group=48))), str)


def test_columns_in_another_order_have_no_group_size_and_those_in_order_have_one():
    assert group_size(first("gptq-4bit-act-order")) is None
    matrix = first("gptq-4bit")
    assert "g_idx" in matrix.parts
    assert group_size(matrix) == 32


def test_picked_rows_have_the_blocks_of_the_whole_matrix():
    matrix, rows = first("gptq-4bit-asym"), np.array([5, 0, 33])
    kind = block_type(matrix)
    assert kind is GGMLType.Q5_0
    assert np.array_equal(blocks(matrix.picked(rows), kind).by_row, blocks(matrix, kind).by_row[rows])
