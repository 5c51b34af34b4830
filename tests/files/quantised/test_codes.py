"""Codes of quantised folders beside loops and other libraries, and their matrices in blocks of ggml."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS, NAMES, tensors_of
from helpers.refusals import refuses
from safetensors.numpy import load_file

from llorch.files import open_weights
from llorch.files.quant import GGMLType
from llorch.files.quantised import QuantisedFolder
from llorch.files.quantised.blocks import block_type, blocks, group_size
from llorch.files.quantised.codes import E2M1, E4M3, E8M0, INT8, awq, codes_across, high_first, stream, ten_per_word
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.model.blocks import forward
from llorch.model.cache import KVCache


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as 32-bit words of a stream, by Python's integers."""
    n_words = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    return np.frombuffer(b"".join(row.to_bytes(4 * n_words, "little") for row in rows), "<i4").reshape(len(codes), -1)


def drawn(shape: tuple[int, int], bits: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape).astype(np.uint8)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [32, 45, 96])
def test_a_stream_has_its_codes_one_after_another(bits: int, count: int):
    codes = drawn((5, count), bits)
    np.testing.assert_array_equal(stream(packed(codes, bits), bits, count), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [slice(0, 96), slice(7, 41), np.array([95, 0, 33, 33]), np.array([64])])
def test_words_along_the_rows_give_any_rows(bits: int, rows: slice | np.ndarray):
    codes = drawn((96, 6), bits)
    np.testing.assert_array_equal(codes_across(packed(codes.T, bits), bits, rows, 96), codes[rows])


@pytest.mark.parametrize("rows", [slice(3, 29), np.array([31, 2, 17])])
def test_words_of_rows_may_end_in_the_middle(rows: slice | np.ndarray):
    codes = drawn((40, 3), 3)
    np.testing.assert_array_equal(codes_across(packed(codes.T, 3), 3, rows, 40), codes[rows])


@pytest.mark.parametrize("rows", [slice(0, 16), slice(3, 11), np.array([15, 0, 6])])
def test_awq_has_even_rows_before_odd_ones(rows: slice | np.ndarray):
    codes = drawn((16, 4), 4)
    stored = codes.reshape(2, 8, 4)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(16, 4)
    np.testing.assert_array_equal(awq(packed(stored.T, 4), rows, 16), codes[rows])


def test_ten_codes_of_three_bits_may_share_a_word():
    codes = drawn((4, 25), 3)
    words = [[sum(int(code) << 3 * i for i, code in enumerate(row[j : j + 10])) for j in (0, 10, 20)] for row in codes]
    np.testing.assert_array_equal(ten_per_word(np.array(words, np.int32), 25), codes)


def test_the_upper_half_of_a_byte_may_come_first():
    data = np.array([0x12, 0xF0, 0x34], np.uint8)
    np.testing.assert_array_equal(high_first(data, slice(0, 2), 3), [[1, 2, 15], [0, 3, 4]])
    np.testing.assert_array_equal(high_first(data, slice(1, 2), 3), [[0, 3, 4]])
    np.testing.assert_array_equal(high_first(data, np.array([1, 0]), 3), [[0, 3, 4], [1, 2, 15]])


def test_tables_of_small_floats_are_those_of_torch():
    import torch

    data = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3, data.view(torch.float8_e4m3fn).float().numpy())
    np.testing.assert_array_equal(E8M0, data.view(torch.float8_e8m0fnu).float().numpy())
    np.testing.assert_array_equal(INT8, data.view(torch.int8).float().numpy())
    np.testing.assert_array_equal(E2M1[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(E2M1[8:], -E2M1[:8])


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


GOLDENS = json.loads((FOLDERS / "goldens.json").read_text())


def opened(name: str) -> QuantisedFolder:
    source = open_weights(FOLDERS / name).source
    assert isinstance(source, QuantisedFolder)
    return source


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()


def test_every_folder_has_goldens():
    assert GOLDENS.keys() == {*NAMES, "gpt-oss-mxfp4"}
    assert len(NAMES) > 50


def test_folders_and_goldens_take_less_than_three_million_bytes():
    assert sum(file.stat().st_size for file in FOLDERS.rglob("*") if file.is_file()) < 3_000_000


@pytest.mark.parametrize("name", NAMES)
def test_each_number_is_that_of_the_library(name: str):
    folder, golden = opened(name), GOLDENS[name]
    assert golden["weights"].keys() == folder.matrices.keys()
    assert golden["rounds_to"] == ("float16" if name.startswith("awq-gemv") else "float32")
    for weight, wanted in golden["weights"].items():
        made = folder.array(weight).astype(golden["rounds_to"]).astype(np.float32)
        assert list(made.shape) == wanted["shape"]
        places = np.linspace(0, made.size - 1, len(wanted["samples"])).astype(int)
        np.testing.assert_allclose(made.reshape(-1)[places], wanted["samples"], rtol=1e-8, atol=0, err_msg=weight)
        # Some libraries give a zero without its sign.
        assert wanted["sha256"] in (sha256(made), sha256(made + np.float32(0))), weight


LOGITS = load_file(FOLDERS / "logits.safetensors")


@pytest.mark.parametrize("name", sorted(key.removesuffix("/weights") for key in LOGITS if key.endswith("/weights")))
def test_logits_are_those_of_a_foreign_engine_that_read_the_folder(name: str):
    """transformers, compressed-tensors, gptqmodel and others; float64 where the engine computes in it."""
    said, wanted = GOLDENS[name]["forward"], LOGITS[f"{name}/weights"].astype(np.float64)
    weights = open_weights(FOLDERS / name).astype(np.float64)
    made = forward(np.array(said["tokens"]), weights, KVCache(weights.config, weights.dtype))[said["positions"]]
    # llorch rounds a weight to float32; only the numbers of NVFP4, with two scales of floats, do not fit it.
    allowed = 1e-6 if name == "ct-nvfp4" else 1e-12 if said["dtype"] == "float64" else 1e-5
    assert np.abs(made - wanted).max() / np.abs(wanted).max() < allowed


def test_experts_of_gpt_oss_are_decoded_and_its_family_is_refused():
    stored = tensors_of(FOLDERS / "gpt-oss-mxfp4")
    for name, wanted in GOLDENS["gpt-oss-mxfp4"]["weights"].items():
        blocks, scales = (stored[f"{name}_{part}"] for part in ("blocks", "scales"))
        codes = stream(np.frombuffer(blocks[2], np.uint8).reshape(-1, 16), 4, 32)
        numbers = E2M1[codes] * E8M0[np.frombuffer(scales[2], np.uint8)][:, None]
        experts = numbers.reshape(*scales[1][:2], -1).swapaxes(1, 2)
        assert list(experts.shape) == wanted["shape"]
        assert wanted["sha256"] in (sha256(experts), sha256(experts + np.float32(0)))
    with refuses("Unsupported", "gpt_oss"):
        open_weights(FOLDERS / "gpt-oss-mxfp4")


def test_one_number_that_is_off_by_a_bit_is_seen():
    made, golden = opened("mlx-4bit"), GOLDENS["mlx-4bit"]["weights"]
    name = next(iter(golden))
    array = made.array(name)
    array[5, 7] = np.nextafter(array[5, 7], np.float32(9))
    assert golden[name]["sha256"] not in (sha256(array), sha256(array + np.float32(0)))
