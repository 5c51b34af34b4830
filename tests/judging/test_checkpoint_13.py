"""Checkpoint 13: blocks, roundings and products of every quantised type, against the stored goldens of llama.cpp."""

import re
import shutil
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from helpers.kept_suites import quantised_rows
from helpers.refusals import refuses
from helpers.stored_goldens import quantised_golden

from llorch.judging.expectations import quantised as verify_quantised
from llorch.judging.expectations.quantised import BACKENDS, verify_quantised_stored
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.judging.goldens.quantised import FOLDER, ROUNDED_TO, types
from llorch.judging.types import Comparison
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import FAIL, FLOOR, PASS
from llorch.stages.table import BY_NAME, STAGES

Place = tuple[str, int | None, str, str]  # mode, layer, case, backend
Places = dict[str, set[Place]]  # by stage
AFTER = ("near, 1 cached", "near, 4 cached", "near, 7 cached")
ALONE: set[Place] = {("exact", None, "near", "numpy-ggml")}


@cache
def comparisons() -> dict[str, list[Comparison]]:
    """By model or type."""
    grouped: dict[str, list[Comparison]] = {}
    for comparison in quantised_rows():
        grouped.setdefault(comparison.model, []).append(comparison)
    return grouped


def expected() -> dict[str, Places]:
    every: dict[str, Places] = {kind.name: {f"decode.{kind.name}": ALONE} for kind in types()}
    for kind in ROUNDED_TO:
        names = ("x86", "generic") if kind.startswith("Q8") else ("x86",)
        every.setdefault(kind, {}).update({f"rounding.{kind}.{name}": ALONE for name in names})
    for model, recipe in MODELS.items():
        of_model = every.setdefault(model, {})
        of_model["file"] = ALONE
        for stage in (stage for stage in STAGES if stage.applies_to(recipe.config)):
            modes = [("isolated", "near"), ("chained", "near"), *(("decode", case) for case in AFTER)]
            modes += [("free", "near")] if stage.name == "logits" else []
            layers = (0, 1) if stage.in_layer else (None,)
            places = product(modes, layers, BACKENDS["own"])
            of_model[stage.name] = {(mode, layer, case, backend) for (mode, case), layer, backend in places}
    return every


@pytest.mark.parametrize(("name", "places"), expected().items(), ids=expected())
def test_checkpoint_13(name: str, places: Places):
    found: Places = {}
    for c in comparisons()[name]:
        found.setdefault(c.stage_ref.name, set()).add((c.mode, c.stage_ref.layer, c.stage_ref.run, c.backend))
    assert found == places
    assert {c.stage_ref.checkpoint for c in comparisons()[name]} == {"13"}
    bad = [c for c in comparisons()[name] if c.verdict != PASS]
    assert not bad, f"{len(bad)} of {len(comparisons()[name])} rows fail, first: {bad[0]}"


def test_checkpoint_13_rows_are_all_looked_at():
    assert comparisons().keys() == expected().keys()


@pytest.mark.parametrize(
    ("mode", "stages", "least", "greatest"),
    [
        ("isolated", {"embed", "k_cache", "v_cache"}, 0.0, 0.0),  # the same bits
        ("isolated", {"attn_residual", "block_out"}, FLOOR, FLOOR),
        ("isolated", {stage.name for stage in STAGES if stage.matrix}, 1e-6, 4e-6),  # most where minima cancel
        ("chained", {*BY_NAME}, 1e-6, 1.9e-5),
        ("free", {"logits"}, 0.01, 0.7),  # of IQ1_M: its steps are the widest, and every value may be near an edge
    ],
)
def test_checkpoint_13_grants_what_is_derived(mode: str, stages: set[str], least: float, greatest: float):
    tolerance = [c.tolerance.error for c in quantised_rows() if c.mode == mode and c.stage_ref.name in stages]
    assert least <= max(tolerance) <= greatest


def test_checkpoint_13_has_eight_distinct_tokens():
    assert len(set(quantised_golden().case.ids)) == len(quantised_golden().case.ids) == 8


@pytest.mark.parametrize("missing", ["golden.json", "blocks.safetensors.xz", "Q4_K_M.safetensors.xz"])
def test_checkpoint_13_fails_without_a_golden(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(goldens_folder() / FOLDER, tmp_path / FOLDER)
    (tmp_path / FOLDER / missing).unlink()
    monkeypatch.setattr(verify_quantised, "goldens_folder", lambda: tmp_path)
    with refuses(FileNotFoundError, "reference_outputs/regenerate.py", where=tmp_path / FOLDER / missing):
        list(verify_quantised_stored())


def test_checkpoint_13_does_not_judge_a_model_that_the_goldens_are_not_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_quantised, "read", lambda folder: quantised_golden())
    monkeypatch.setattr(verify_quantised, "MODELS", {"Q1_0": MODELS["Q1_0"]})
    monkeypatch.setattr(verify_quantised, "write_model", lambda name, folder: write_other(folder))
    (comparison,) = [c for c in verify_quantised_stored() if not c.stage_ref.name.startswith(("decode.", "rounding."))]
    assert (comparison.model, comparison.stage_ref.name, comparison.verdict) == ("Q1_0", "file", FAIL)
    assert len(set(re.findall(r"\b[0-9a-f]{12}\b", comparison.note))) == 2


def write_other(folder: Path) -> Path:
    """The model with one bit of one matrix turned."""
    path = write_model("Q1_0", folder)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    return path
