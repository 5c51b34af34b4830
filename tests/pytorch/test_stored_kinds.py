"""Packed matrices of quantised folders, against the folders' own decoding in NumPy."""

import ctypes
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.quantised_folders import FOLDERS, NAMES, Tensors, changed
from helpers.kernel_tolerances import distance
from helpers.refusals import refuses

from llorch.files import Weights, open_weights
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.ops.compiled.library import library
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.kernels.packing import HALF_TYPES, Fields, Table, decode, shorten
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.load import load_packed
from llorch.pytorch.model import load_torch
from llorch.pytorch.stored_kinds import block_size, group_order, in_group_order, kind_of, pack_stored, packed_bytes
from llorch.runtime.errors import FormatError


def quantised(weights: Weights) -> list[str]:
    return [name for name in weights if isinstance(weights.as_stored(name), QuantisedMatrix)]


def in_half_precision(weights: Weights) -> list[str]:
    return [name for name in weights if len(weights.shape(name)) == 2 and weights.stored_type(name) in HALF_TYPES]


@cache
def first_matrix(folder: str) -> QuantisedMatrix:
    weights = open_weights(FOLDERS / folder)
    matrix = weights.as_stored(quantised(weights)[0])
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def first_kind(folder: str) -> Table:
    kind = kind_of(weights_with_experts(first_matrix(folder)), "w")
    assert isinstance(kind, Table)
    return kind


class Source:
    """An opened folder."""


def weights_with_experts(*experts: QuantisedMatrix) -> Any:
    """Weights that have one tensor, the matrices of all experts."""
    return SimpleNamespace(
        source=Source(), as_stored=lambda name: experts[0], all_stored=lambda name: list(experts),
        shape=lambda name: (len(experts), *experts[0].shape),
    )  # fmt: skip


def with_recipe(matrix: QuantisedMatrix, **changes: Any) -> QuantisedMatrix:
    return replace(matrix, recipe=replace(matrix.recipe, **changes))


def decode_table(matrix: QuantisedMatrix, kind: Table, change: Callable[[Fields], Fields] = dict) -> np.ndarray:
    ordered = in_group_order(matrix)
    assert isinstance(ordered, QuantisedMatrix)
    numbers, order = decode(change(pack_stored(ordered, kind)), kind).numpy(), group_order(matrix)
    return numbers if order is None else numbers[:, np.argsort(order)]


@pytest.mark.parametrize("folder", NAMES)
def test_packed_matrices_of_every_folder_decode_to_the_bits_of_the_folder(folder):
    weights = open_weights(FOLDERS / folder)
    with closing(weights.source):
        assert quantised(weights)
        for name in quantised(weights):
            kind, stored = kind_of(weights, name), weights.as_stored(name)
            assert isinstance(kind, Table)
            assert isinstance(stored, QuantisedMatrix)
            for change in (dict, shorten):
                assert np.array_equal(
                    decode_table(stored, kind, change).view(np.uint32), stored.decode().view(np.uint32)
                )


@pytest.mark.parametrize(
    ("folder", "dtypes"),
    [
        ("awq-gemm", {"d": torch.float16, "zero": torch.bfloat16}),
        ("mlx-4bit", {"d": torch.bfloat16, "minimum": torch.bfloat16}),
        ("ct-fp8-dynamic", {"d": torch.bfloat16}),
        ("bnb-nf4-double", {"d": torch.float32}),
    ],
)
def test_scales_take_16_bits_where_these_hold_every_number(folder, dtypes):
    matrix = in_group_order(first_matrix(folder))
    assert isinstance(matrix, QuantisedMatrix)
    fields = shorten(pack_stored(matrix, first_kind(folder)))
    assert {name: field.dtype for name, field in fields.items() if name != "codes"} == dtypes


@pytest.mark.gpu
def test_a_folder_on_cuda_has_scales_of_16_bits():
    module = load_torch(FOLDERS / "mlx-4bit", device="cuda", residency="packed").module
    layers = [one for one in module.modules() if isinstance(one, QuantisedLinear)]
    assert layers
    assert {layer.fields["d"].dtype for layer in layers} <= set(HALF_TYPES.values())


@pytest.mark.parametrize("folder", ["awq-gemm", "mlx-4bit", "bnb-nf4-double", "ct-fp8-dynamic", "ct-nvfp4"])
def test_predicted_bytes_hold_all_fields_and_few_more(folder):
    weights = open_weights(FOLDERS / folder)
    with closing(weights.source):
        for name in quantised(weights):
            kind, stored = kind_of(weights, name), weights.as_stored(name)
            assert isinstance(kind, Table)
            assert isinstance(stored, QuantisedMatrix)
            taken = sum(field.nbytes for field in pack_stored(stored, kind).values())
            assert taken <= packed_bytes(weights, name) <= 1.5 * taken


@pytest.mark.parametrize("folder", ["awq-gemm", "gptq-4bit-act-order", "mlx-6bit", "modelopt-nvfp4"])
def test_a_model_with_packed_matrices_computes_the_logits_of_the_decoded_one(folder):
    packed, decoded = (load_torch(FOLDERS / folder, residency=residency) for residency in ("packed", "decoded"))
    codes = {name for name, _ in packed.module.named_buffers() if name.endswith(".codes")}
    assert len(codes) == len(quantised(packed.weights)) + len(in_half_precision(packed.weights))
    actual, expected = (model.forward([3, 1, 4, 1, 5]) for model in (packed, decoded))
    assert np.linalg.norm(actual - expected) < 1e-5 * np.linalg.norm(expected)


def load_logits(path: Path, load: Any) -> CausalLM:
    weights = open_weights(path)
    with closing(weights.source):
        return load(weights, dtype=torch.float32, device=torch.device("cpu"))


def test_rows_with_one_zero_point_are_packed_by_the_kind_of_the_whole_matrix():
    whole, kind = first_matrix("awq-gemm"), first_kind("awq-gemm")
    assert kind.has_zeros
    alike = with_recipe(whole.picked(np.array([5])), zero=lambda parts, rows: np.full((len(rows), 2), 3, np.float32))
    assert np.array_equal(decode_table(alike, kind), alike.decode())


@pytest.mark.parametrize("group", [24, 40])
def test_groups_that_sixteen_does_not_divide_are_decoded(group):
    assert kind_of(weights_with_experts(with_recipe(first_matrix("gptq-4bit"), group=group)), "w") is None


def test_groups_of_different_sizes_are_decoded():
    numbers = np.arange(64) // 40
    numbers[5] = 1
    assert (
        kind_of(weights_with_experts(with_recipe(first_matrix("gptq-4bit"), group=lambda parts: numbers)), "w") is None
    )


def test_a_row_that_is_no_multiple_of_32_columns_is_decoded():
    assert kind_of(weights_with_experts(replace(first_matrix("mlx-4bit"), shape=(64, 48))), "w") is None


@pytest.mark.parametrize(
    "change", [{"divisor": lambda parts, rows: np.full((1, 1), 3, np.float32)}, {"factor": np.float32(3)}]
)
def test_experts_whose_last_factors_differ_are_decoded(change):
    one = first_matrix("ct-nvfp4")
    assert isinstance(kind_of(weights_with_experts(one, one), "w"), Table)
    assert kind_of(weights_with_experts(one, with_recipe(one, **change)), "w") is None


def test_columns_in_group_order_stay_together_and_others_by_group():
    assert (
        block_size(weights_with_experts(first_matrix("gptq-4bit-act-order")), "w")
        == first_matrix("gptq-4bit-act-order").shape[1]
    )
    assert block_size(weights_with_experts(first_matrix("gptq-4bit")), "w") == 32
    assert block_size(weights_with_experts(first_matrix("mlx-nvfp4")), "w") == 32


def test_nan_code_is_refused(tmp_path):
    def spoil(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith("down_proj.weight"))
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, data[:-1] + b"\x7f"

    with refuses(FormatError, "NonFinite", "(63, 159)"):
        load_logits(changed(tmp_path, "ct-fp8-dynamic", tensors=spoil), load_packed)


@pytest.fixture
def compiled() -> ctypes.CDLL:
    if (compiled := library()) is None:
        pytest.skip("NOT RUN: no C compiler")
    return compiled


@pytest.mark.parametrize("folder", ["awq-gemm", "gptq-4bit-asym", "mlx-4bit", "mlx-8bit"])
def test_product_with_zero_points_subtracts_no_large_sums(folder: str, compiled: ctypes.CDLL):
    matrix, kind = first_matrix(folder), first_kind(folder)
    weight = torch.from_numpy(matrix.decode())
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((3, weight.shape[1])).astype(np.float32)) + 4
    expected = x.double() @ weight.double().T
    packed = CpuQuantisedLinear(pack_stored(matrix, kind), kind, None, compiled)
    assert distance(packed(x), expected) < max(2 * distance(x @ weight.T, expected), 2e-7)


@pytest.mark.parametrize("folder", ["mlx-4bit", "mlx-8bit"])
def test_all_zero_group_changes_no_other_group(folder: str, compiled: ctypes.CDLL):
    kind = first_kind(folder)
    fields = pack_stored(first_matrix(folder), kind)
    for name in ("d", "minimum"):
        fields[name][0, 0] = 0
    weight = decode(fields, kind)
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((3, weight.shape[1])).astype(np.float32))
    actual = CpuQuantisedLinear(fields, kind, None, compiled)(x)
    assert distance(actual, x.double() @ weight.double().T) < 1e-6
