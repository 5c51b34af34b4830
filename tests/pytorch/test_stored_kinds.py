"""Packed matrices of quantised folders, against the folders' own decoding in NumPy."""

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
from helpers.refusals import refuses

from llorch.files import Weights, open_weights
from llorch.files.quantised.fields import Table, group_order
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels.packing import HALF_TYPES, Fields, decode, shorten
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.load import load_packed
from llorch.pytorch.model import load_torch
from llorch.pytorch.stored_kinds import block_size, kind_of, pack_stored
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
    numbers, order = decode(change(pack_stored(matrix, kind)), kind).numpy(), group_order(matrix)
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
    fields = shorten(pack_stored(first_matrix(folder), first_kind(folder)))
    assert {name: field.dtype for name, field in fields.items() if name != "codes"} == dtypes


@pytest.mark.gpu
def test_a_folder_on_cuda_has_scales_of_16_bits():
    module = load_torch(FOLDERS / "mlx-4bit", device="cuda", residency="packed").module
    layers = [one for one in module.modules() if isinstance(one, QuantisedLinear)]
    assert layers
    assert {layer.fields["d"].dtype for layer in layers} <= set(HALF_TYPES.values())


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
