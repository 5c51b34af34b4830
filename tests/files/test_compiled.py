"""Matrices that C multiplies and decodes, against their decoding in NumPy."""

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES
from builders.table_matrices import TABLES, reader, table_matrix

from llorch.files import compiled, open_weights
from llorch.files.compiled import compiled_matrix, has_compiled_form
from llorch.files.packed import Packed
from llorch.files.quant import GGMLType
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.judging.expectations.quantised_models import matrix_bytes
from llorch.ops.compiled.library import library
from llorch.ops.compiled.products import FEW, KINDS, CompiledMatrix

TYPES = [GGMLType[name] for name in KINDS if not name.startswith("TABLE")]
SHAPES = [(name, n_in) for n_in in (192, 768) for name, (_, group, _) in TABLES.items() if n_in % (group or n_in) == 0]


def first_matrix(folder: str) -> QuantisedMatrix:
    weights = open_weights(FOLDERS / folder)
    return next(m for m in map(weights.as_stored, weights) if isinstance(m, QuantisedMatrix))


def ggml_matrix(kind: GGMLType, n_in: int = 512) -> Packed:
    if kind is GGMLType.F32:
        raw = np.random.default_rng(0).standard_normal((70, n_in)).astype(np.float32).view(np.uint8).reshape(-1)
    else:
        raw = matrix_bytes(kind, (70, n_in), key=kind.name)
    return Packed("w", Path("model.gguf"), raw, kind, (70, n_in))


def compile_matrix(packed: Packed) -> CompiledMatrix:
    if library() is None:
        pytest.skip("NOT RUN: no C compiler")
    matrix = compiled_matrix(packed)
    assert matrix is not None
    return matrix


def assert_decodes_alike(packed: Packed, first: int = 0) -> None:
    actual, expected = np.empty((packed.shape[0] - first, packed.shape[1]), np.float32), packed.decode()[first:]
    compile_matrix(packed).decode_into(first, actual)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def assert_multiplies_alike(packed: Packed, rows: int) -> None:
    """Each product is as near to the float64 product as float32 sums of its terms can be."""
    n_in = packed.shape[1]
    x, weight = np.random.default_rng(rows).standard_normal((rows, n_in)).astype(np.float32), packed.decode()
    actual, expected = compile_matrix(packed).multiply(x), x.astype(np.float64) @ weight.astype(np.float64).T
    assert actual.shape == expected.shape
    sizes = np.abs(x).sum(axis=1, keepdims=True) * 2 * np.abs(weight).max(axis=1) + 1  # numbers and offsets apart
    assert (np.abs(actual - expected) <= n_in * 2.0**-24 * sizes).all()
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("folder", NAMES)
def test_every_matrix_of_every_folder_is_decoded_to_the_same_bits_and_multiplied(folder: str):
    weights = open_weights(FOLDERS / folder)
    with closing(weights.source):
        matrices = [m for name in weights for m in weights.all_stored(name) if isinstance(m, QuantisedMatrix)]
        assert matrices
        for matrix in matrices:
            assert_decodes_alike(matrix)
            assert_multiplies_alike(matrix, 3)


@pytest.mark.parametrize("rows", [1, 3, FEW])
@pytest.mark.parametrize(("name", "n_in"), SHAPES)
def test_product_with_every_table_is_exact_to_float32_rounding(name: str, n_in: int, rows: int):
    assert_multiplies_alike(table_matrix(name, 70, n_in), rows)


@pytest.mark.parametrize(("name", "n_in"), SHAPES)
def test_every_table_is_decoded_to_the_same_bits(name: str, n_in: int):
    assert_decodes_alike(table_matrix(name, 70, n_in), first=3)


@pytest.mark.parametrize("zero", [-8.0, 8.0, 0.5, 9.0, -9.0])
def test_any_zero_point_is_subtracted(zero: float):
    matrix = table_matrix("W4 asym", 70, 768)
    assert matrix.recipe.zero is not None
    zeros = matrix.recipe.zero(matrix.parts, slice(None)).copy()
    zeros[35] = zero
    matrix = replace(matrix, recipe=replace(matrix.recipe, zero=reader(zeros)))
    assert_multiplies_alike(matrix, 1)


@pytest.mark.parametrize("folder", ["gptq-4bit-act-order", "awq-gemm"])
def test_inputs_are_left_as_they_are(folder: str):
    packed = first_matrix(folder)
    x = np.random.default_rng(0).standard_normal((2, packed.shape[1])).astype(np.float32)
    before = x.copy()
    compile_matrix(packed).multiply(x)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("folder", ["awq-gemm", "gptq-4bit-asym", "mlx-4bit", "mlx-8bit"])
def test_product_with_zero_points_subtracts_no_large_sums(folder: str):
    weight = first_matrix(folder).decode()
    x = np.random.default_rng(3).standard_normal((3, weight.shape[1])).astype(np.float32) + np.float32(4)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    errors = [np.linalg.norm(y - expected) for y in (compile_matrix(first_matrix(folder)).multiply(x), x @ weight.T)]
    assert errors[0] < max(2 * errors[1], 2e-7 * np.linalg.norm(expected))


@pytest.mark.parametrize("name", ["MLX 4", "MLX 8", "MLX 4, 16"])
def test_all_zero_group_changes_no_other_group(name: str):
    matrix = table_matrix(name, 70, 192)
    assert matrix.recipe.minimum is not None
    d, minima = (read(matrix.parts, slice(None)).copy() for read in (matrix.recipe.scale, matrix.recipe.minimum))
    d[0, 0] = minima[0, 0] = 0
    assert_multiplies_alike(replace(matrix, recipe=replace(matrix.recipe, scale=reader(d), minimum=reader(minima))), 3)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_matrix_of_every_ggml_type_is_decoded_and_multiplied_in_its_place(kind: GGMLType):
    packed = ggml_matrix(kind)
    assert_decodes_alike(packed, first=3)
    assert_multiplies_alike(packed, 3)
    assert np.shares_memory(compile_matrix(packed).codes, packed.raw)


@pytest.mark.parametrize("kind", [GGMLType.IQ3_S, GGMLType.TQ2_0, GGMLType.NVFP4], ids=lambda kind: kind.name)
def test_matrix_of_another_type_is_not_compiled(kind: GGMLType):
    packed = ggml_matrix(kind)
    assert not has_compiled_form(packed)
    assert compiled_matrix(packed) is None


@pytest.mark.parametrize(
    "packed", [ggml_matrix(GGMLType.BF16, 48), replace(table_matrix("MLX 4", 64, 192), shape=(64, 48))]
)
def test_matrix_without_whole_runs_of_columns_is_not_compiled(packed: Packed):
    assert not has_compiled_form(packed)
    assert compiled_matrix(packed) is None


def test_matrix_whose_decoder_is_wrong_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compiled_decoder_is_right", lambda kind: kind is not GGMLType.Q4_K)
    assert compiled_matrix(ggml_matrix(GGMLType.Q4_K)) is None
    compile_matrix(ggml_matrix(GGMLType.Q6_K))


def test_code_of_nan_is_left_to_the_decoder():
    matrix = table_matrix("FP8", 64, 192)
    matrix.raw[70] = 127
    assert compiled_matrix(matrix) is None


def test_pages_of_every_part_are_released_after_packing(monkeypatch: pytest.MonkeyPatch):
    released: list[np.ndarray] = []
    monkeypatch.setattr(compiled, "release_pages", released.append)
    matrix = first_matrix("awq-gemm")
    compile_matrix(matrix)
    assert [id(raw) for raw in released] == [id(part.raw) for part in matrix.parts.values()]


def test_without_a_library_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert compiled_matrix(table_matrix("MLX 4", 64, 192)) is compiled_matrix(ggml_matrix(GGMLType.Q8_0)) is None
    assert not caplog.records
