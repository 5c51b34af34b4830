"""Checkpoint 14, quantised: the torch path's packed matrices against llama.cpp's goldens of checkpoint 13."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.stored_goldens import quantised_golden

from llorch.files.quant import BLOCK_SIZES, SCALE_OFFSETS, GGMLType
from llorch.judging.expectations import packed as verification
from llorch.judging.expectations import quantised
from llorch.judging.expectations.packed import (
    compare_products,
    packed_models,
    packed_types,
    verify_quantised_torch,
)
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.judging.types import Comparison
from llorch.pytorch import load, stored_kinds
from llorch.pytorch.device import target
from llorch.pytorch.kernels import packing
from llorch.pytorch.kernels.packing import CPU_BLOCK_TYPES, PACKERS
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.table import STAGES

Compared = tuple[str, str, str]  # stage, mode, backend


@cache
def comparisons(device: str, dtype: str) -> list[Comparison]:
    return list(verify_quantised_torch(target(device, dtype)))


def expected(device: str, dtype: str) -> dict[str, set[Compared]]:
    """Of each type and model."""
    backend = f"torch-{device}-{dtype}"
    every = {kind.name: {(f"decode.{kind.name}", "exact", backend)} for kind in packed_types(target(device, dtype))}
    for model in packed_models(target(device, dtype)):
        products = [s.name for s in STAGES if s.matrix and s.applies_to(MODELS[model].config)]
        of_stages = {(stage, "isolated", backend + suffix) for stage in products for suffix in ("", "-plain")}
        every[model] = every.get(model, set()) | {("file", "exact", backend)} | of_stages
    return every


@pytest.mark.nightly_cases("cpu-float16", "cpu-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_checkpoint_14_quantised(device: str, dtype: str):
    found: dict[str, set[Compared]] = {}
    for comparison in comparisons(device, dtype):
        found.setdefault(comparison.model, set()).add((comparison.stage_ref.name, comparison.mode, comparison.backend))
    assert found == expected(device, dtype)
    assert {c.stage_ref.checkpoint for c in comparisons(device, dtype)} == {"13"}
    bad = [c for c in comparisons(device, dtype) if c.verdict != PASS]
    assert not bad, f"{len(bad)} of {len(comparisons(device, dtype))} rows fail, first: {bad[0]}"
    assert {*packed_models(target(device, dtype))} >= {"Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"}
    assert device == "cuda" or len(packed_models(target(device, dtype))) == 12  # without Q4_1 and Q5_1


def test_checkpoint_14_quantised_covers_both_layers():
    layers: dict[tuple[str, ...], set[int | None]] = {}
    for comparison in comparisons("cpu", "float32"):
        stage_ref = comparison.stage_ref
        if comparison.mode == "isolated" and stage_ref.name != "logits":
            layers.setdefault((comparison.model, stage_ref.name, comparison.backend), set()).add(stage_ref.layer)
    assert all(found == {0, 1} for found in layers.values())


def test_checkpoint_14_quantised_float32_tolerance_is_as_in_numpy():
    tolerance = {c.model: 0.0 for c in comparisons("cpu", "float32")}
    for comparison in comparisons("cpu", "float32"):
        tolerance[comparison.model] = max(tolerance[comparison.model], comparison.tolerance.error)
    assert max(tolerance[kind.name] for kind in PACKERS) <= 2.5e-6
    assert max(tolerance.values()) <= 4e-6


def test_checkpoint_14_quantised_grants_half_precision_a_few_roundings_only():
    tolerance = {dtype: max(c.tolerance.error for c in comparisons("cpu", dtype)) for dtype in ("bfloat16", "float16")}
    assert tolerance["bfloat16"] < 0.04
    assert tolerance["float16"] < 0.005


Spoil = Callable[[np.ndarray, GGMLType], None]  # changes blocks (n, block_bytes) of a type


def swap_halves(blocks: np.ndarray, kind: GGMLType) -> None:
    codes = blocks[:, FIRST_CODE[kind] :][:, : BLOCK_SIZES[kind][0] // 2]
    codes[...] = codes >> 4 | codes << 4


def neighbours_scale(blocks: np.ndarray, kind: GGMLType) -> None:
    for offset in SCALE_OFFSETS[kind]:
        scales = blocks[:, offset : offset + 2]
        scales[...] = np.roll(scales, 1, axis=0)


def drop_minimum(blocks: np.ndarray, kind: GGMLType) -> None:
    offset = SCALE_OFFSETS[kind][1]
    blocks[:, offset : offset + 2] = 0


def drop_upper_bits(blocks: np.ndarray, kind: GGMLType) -> None:
    start, stop = UPPER_BITS[kind]
    blocks[:, start:stop] = 0


FIRST_CODE = {
    GGMLType.Q4_0: 2, GGMLType.Q4_1: 4, GGMLType.Q5_0: 6, GGMLType.Q4_K: 16, GGMLType.Q5_K: 48, GGMLType.Q6_K: 0,
    GGMLType.IQ4_XS: 8,
}  # fmt: skip
UPPER_BITS = {GGMLType.Q5_0: (2, 6), GGMLType.Q5_1: (4, 8), GGMLType.Q5_K: (16, 48), GGMLType.Q6_K: (128, 192)}
MISTAKES: list[tuple[GGMLType, Spoil]] = [
    *((kind, swap_halves) for kind in FIRST_CODE),
    *((kind, neighbours_scale) for kind in SCALE_OFFSETS if SCALE_OFFSETS[kind]),
    *((kind, drop_minimum) for kind, offsets in SCALE_OFFSETS.items() if len(offsets) == 2),
    *((kind, drop_upper_bits) for kind in UPPER_BITS),
]


def products(name: str, folder: Path) -> list[Comparison]:
    return list(compare_products(name, write_model(name, folder), quantised_golden(), target("cpu", "float32")))


@pytest.mark.slow_cases(but=["Q4_K-swap_halves", "Q8_0-neighbours_scale", "Q5_0-drop_upper_bits"])
@pytest.mark.parametrize(("kind", "spoil"), MISTAKES, ids=lambda part: getattr(part, "name", None) or part.__name__)
def test_injected_field_error_fails_every_product(kind, spoil, tmp_path, monkeypatch):
    right = load.read_blocks

    def wrong(*arguments: Any) -> torch.Tensor:
        blocks = right(*arguments)
        spoil(blocks.numpy().reshape(-1, BLOCK_SIZES[kind][1]), kind)
        return blocks

    monkeypatch.setattr(load, "read_blocks", wrong)
    rows = products(kind.name, tmp_path)
    assert {c.backend for c in rows} == {"torch-cpu-float32", "torch-cpu-float32-plain"}
    assert all(c.verdict == FAIL and c.difference.error > 10 * c.tolerance.error for c in rows)


def test_wrong_reference_decoder_fails_every_product_of_the_plain_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "decode_by_reference", lambda raw, kind, out: out.fill(0.5))
    rows = [c for c in products("Q8_0", tmp_path) if c.backend.endswith("-plain")]
    assert rows
    assert all(c.verdict == FAIL and c.difference.error > 10 * c.tolerance.error for c in rows)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_q_and_k_rows_in_file_order_fail_their_products(name, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_kinds, "undo_interleave", lambda rows, heads: rows.copy())
    for comparison in products(name, tmp_path):
        reordered = comparison.stage_ref.name in ("q_proj", "k_proj")
        assert comparison.verdict == (FAIL if reordered else PASS)
        assert not reordered or comparison.difference.error > 10 * comparison.tolerance.error


def test_products_of_another_file_are_not_compared(monkeypatch):
    monkeypatch.setattr(quantised, "fingerprint", lambda path: "another")
    monkeypatch.setattr(verification, "packed_models", lambda target: ("Q4_0",))
    stages = [c.stage_ref.name for c in verify_quantised_torch(target("cpu", "float32"))]
    assert stages == [*(f"decode.{kind.name}" for kind in CPU_BLOCK_TYPES), "file"]
