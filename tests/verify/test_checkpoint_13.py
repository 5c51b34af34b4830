"""Checkpoint 13: blocks, roundings and products of every quantised type, against the stored goldens of llama.cpp."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from planted_quantised import golden

from llorch.builtin import goldens_folder
from llorch.stages import BY_NAME, STAGES
from llorch.verify.compare import FLOOR
from llorch.verify.judge import FAIL, PASS, Row
from llorch.verify.suites import quantised as verify_quantised
from llorch.verify.suites.quantised import BACKENDS, verify_quantised_stored
from llorch.verify.suites.quantised_goldens import FOLDER, ROUNDED_TO, types
from llorch.verify.suites.quantised_models import MODELS, write_model

Key = tuple[str, str]  # model or type, stage
Place = tuple[str, int | None, str, str]  # mode, layer, case, backend
AFTER = ("near, 1 cached", "near, 4 cached", "near, 7 cached")


@cache
def rows() -> dict[Key, list[Row]]:
    grouped: dict[Key, list[Row]] = {}
    for row in verify_quantised_stored():
        grouped.setdefault((row.model, row.stage), []).append(row)
    return grouped


def expected() -> Iterator[tuple[Key, set[Place]]]:
    alone: set[Place] = {("exact", None, "near", "numpy-ggml")}
    for kind in types():
        yield (kind.name, f"decode.{kind.name}"), alone
    for kind in ROUNDED_TO:
        for name in ("x86", "generic") if kind.startswith("Q8") else ("x86",):
            yield (kind, f"rounding.{kind}.{name}"), alone
    for model, recipe in MODELS.items():
        yield (model, "file"), alone
        for stage in (stage for stage in STAGES if stage.applies_to(recipe.config)):
            modes = [("isolated", "near"), ("chained", "near"), *(("decode", case) for case in AFTER)]
            modes += [("free", "near")] if stage.name == "logits" else []
            layers = (0, 1) if stage.in_layer else (None,)
            yield (
                (model, stage.name),
                {(mode, layer, case, b) for mode, case in modes for layer in layers for b in BACKENDS},
            )


@pytest.mark.parametrize(
    ("key", "places"), list(expected()), ids=["checkpoint_13-" + "-".join(k) for k, _ in expected()]
)
def test_checkpoint(key: Key, places: set[Place]):
    found = rows().get(key, [])
    assert {(row.mode, row.layer, row.case, row.backend) for row in found} == places
    assert {row.checkpoint for row in found} == {"13"}
    bad = [row for row in found if row.verdict != PASS]
    assert not bad, f"{len(bad)} of {len(found)} rows fail, first: {bad[0]}"


def test_checkpoint_13_rows_are_all_looked_at():
    assert rows().keys() == {key for key, _ in expected()}


@pytest.mark.parametrize(
    ("mode", "stages", "least", "most"),
    [
        ("isolated", {"embed", "k_cache", "v_cache"}, 0.0, 0.0),  # the same bits
        ("isolated", {"attn_residual", "block_out"}, FLOOR, FLOOR),
        ("isolated", {stage.name for stage in STAGES if stage.matrix}, 1e-6, 4e-6),  # most where minima cancel
        ("chained", {*BY_NAME}, 1e-6, 1.8e-5),
        ("free", {"logits"}, 0.01, 0.3),
    ],
)
def test_checkpoint_13_grants_what_is_derived(mode: str, stages: set[str], least: float, most: float):
    granted = [row.tolerance for found in rows().values() for row in found if row.mode == mode and row.stage in stages]
    assert least <= max(granted) <= most


def test_checkpoint_13_has_eight_distinct_tokens():
    assert len(set(golden().case.ids)) == len(golden().case.ids) == 8


@pytest.mark.parametrize("missing", ["golden.json", "blocks.safetensors", "Q4_K_M.safetensors"])
def test_checkpoint_13_fails_without_a_golden(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(goldens_folder() / FOLDER, tmp_path / FOLDER)
    (tmp_path / FOLDER / missing).unlink()
    monkeypatch.setattr(verify_quantised, "goldens_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{missing} is missing; make it with reference_outputs/regenerate"):
        list(verify_quantised_stored())


def test_checkpoint_13_does_not_judge_a_model_that_the_goldens_are_not_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_quantised, "MODELS", {"Q1_0": MODELS["Q1_0"]})
    monkeypatch.setattr(verify_quantised, "write_model", lambda name, folder: write_other(folder))
    (row,) = [row for row in verify_quantised_stored() if not row.stage.startswith(("decode.", "rounding."))]
    assert (row.model, row.stage, row.verdict) == ("Q1_0", "file", FAIL)
    assert row.note.startswith("made ")


def write_other(folder: Path) -> Path:
    """The model with one bit of one matrix turned."""
    path = write_model("Q1_0", folder)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    return path
