"""Checkpoint 14, quantised: the torch path's packed matrices against llama.cpp's goldens of checkpoint 13."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stored_goldens import quantised_golden

from llorch.files.quant import GGMLType
from llorch.judging.expectations import packed as verification
from llorch.judging.expectations import quantised
from llorch.judging.expectations.packed import PACKED_MODELS, compare_products, verify_quantised_torch
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.judging.types import Comparison
from llorch.pytorch import load, stored_kinds
from llorch.pytorch.device import target
from llorch.pytorch.kernels import packing
from llorch.pytorch.kernels.packing import PACKERS, Fields
from llorch.stages.comparison import FAIL, PASS
from llorch.stages.table import STAGES

Compared = tuple[str, str, str]  # stage, mode, backend


@cache
def comparisons(device: str, dtype: str) -> list[Comparison]:
    return list(verify_quantised_torch(target(device, dtype)))


def expected(device: str, dtype: str) -> dict[str, set[Compared]]:
    """Of each type and model."""
    backend = f"torch-{device}-{dtype}"
    every = {kind.name: {(f"decode.{kind.name}", "exact", backend)} for kind in PACKERS}
    for model in PACKED_MODELS:
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
    assert {"Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M"} == set(PACKED_MODELS)


def test_checkpoint_14_quantised_covers_both_layers():
    layers: dict[tuple[str, ...], set[int | None]] = {}
    for comparison in comparisons("cpu", "float32"):
        stage_ref = comparison.stage_ref
        if comparison.mode == "isolated" and stage_ref.name != "logits":
            layers.setdefault((comparison.model, stage_ref.name, comparison.backend), set()).add(stage_ref.layer)
    assert all(found == {0, 1} for found in layers.values())


def test_checkpoint_14_quantised_float32_tolerance_is_as_in_numpy():
    assert max(c.tolerance.error for c in comparisons("cpu", "float32")) <= 2.5e-6


def test_checkpoint_14_quantised_grants_half_precision_a_few_roundings_only():
    tolerance = {dtype: max(c.tolerance.error for c in comparisons("cpu", dtype)) for dtype in ("bfloat16", "float16")}
    assert tolerance["bfloat16"] < 0.04
    assert tolerance["float16"] < 0.005


def swap_halves(fields: Fields) -> None:
    fields["codes"].copy_(fields["codes"] >> 4 | fields["codes"] << 4)


def neighbours_scale(fields: Fields) -> None:
    fields["d"].copy_(fields["d"].roll(1, 1) if fields["d"].shape[1] > 1 else fields["d"].roll(1, 0))


def neighbours_inner_scale(fields: Fields) -> None:
    fields["scales"].copy_(fields["scales"].roll(3 if fields["scales"].dtype is torch.uint8 else 1, 1))


def drop_minimum(fields: Fields) -> None:
    fields["dmin"].zero_()


def drop_upper_bits(fields: Fields) -> None:
    fields["upper"].zero_()


def drop_sign_of_scales(fields: Fields) -> None:
    fields["scales"].abs_()


MISTAKES: list[tuple[str, Callable[[Fields], None]]] = [
    *((name, swap_halves) for name in ("Q4_0", "Q4_K", "Q6_K")),
    *((name, neighbours_scale) for name in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")),
    *((name, neighbours_inner_scale) for name in ("Q4_K", "Q6_K")),
    ("Q4_K", drop_minimum),
    ("Q6_K", drop_upper_bits),
    ("Q6_K", drop_sign_of_scales),
]


def products(name: str, folder: Path) -> list[Comparison]:
    return list(compare_products(name, write_model(name, folder), quantised_golden(), target("cpu", "float32")))


@pytest.mark.slow_cases(but=["Q4_K-swap_halves", "Q8_0-neighbours_scale"])
@pytest.mark.parametrize(("name", "spoil"), MISTAKES, ids=lambda part: getattr(part, "__name__", part))
def test_injected_field_error_fails_every_product(name, spoil, tmp_path, monkeypatch):
    right = load.pack_file_blocks

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        fields = right(*arguments)
        spoil(fields)
        return fields

    monkeypatch.setattr(load, "pack_file_blocks", wrong)
    found = products(name, tmp_path)
    assert {c.backend for c in found} == {"torch-cpu-float32", "torch-cpu-float32-plain"}
    assert all(c.verdict == FAIL and c.difference.error > 10 * c.tolerance.error for c in found)


def test_unsigned_bytes_fail_every_product_of_the_torch_decoder(tmp_path, monkeypatch):
    def unsigned(fields: Fields) -> torch.Tensor:
        return packing._scaled(fields["codes"].view(torch.uint8), fields["d"].float())

    monkeypatch.setattr(packing, "DECODERS", {GGMLType.Q8_0: unsigned})
    found = [c for c in products("Q8_0", tmp_path) if c.backend.endswith("-plain")]
    assert found
    assert all(c.verdict == FAIL and c.difference.error > 10 * c.tolerance.error for c in found)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_q_and_k_rows_in_file_order_fail_their_products(name, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_kinds, "undo_interleave", lambda rows, heads: rows.copy())
    for comparison in products(name, tmp_path):
        reordered = comparison.stage_ref.name in ("q_proj", "k_proj")
        assert comparison.verdict == (FAIL if reordered else PASS)
        assert not reordered or comparison.difference.error > 10 * comparison.tolerance.error


def test_products_of_another_file_are_not_compared(monkeypatch):
    monkeypatch.setattr(quantised, "fingerprint", lambda path: "another")
    monkeypatch.setattr(verification, "PACKED_MODELS", ("Q4_0",))
    stages = [c.stage_ref.name for c in verify_quantised_torch(target("cpu", "float32"))]
    assert stages == [*(f"decode.{kind.name}" for kind in PACKERS), "file"]
