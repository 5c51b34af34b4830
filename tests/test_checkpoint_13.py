"""Checkpoint 13: blocks, roundings and products of every quantised type, against the stored goldens of llama.cpp."""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from planted_quantised import golden

from llorch import verify_quantised
from llorch.builtin import goldens_folder
from llorch.quantised_goldens import FOLDER, ROUNDED_TO, types
from llorch.quantised_models import MODELS, write_model
from llorch.stages import STAGES
from llorch.verifier import FAIL, PASS, Row
from llorch.verify_quantised import BACKENDS, verify_quantised_stored

Key = tuple[str, str, str, str]  # model or type, stage, mode, backend
INPUTS = ("attn_norm", "attn_context", "ffn_norm", "ffn_act", "final_norm")


@cache
def rows() -> dict[Key, list[Row]]:
    grouped: dict[Key, list[Row]] = {}
    for row in verify_quantised_stored():
        grouped.setdefault((row.model, row.stage, row.mode, row.backend), []).append(row)
    return grouped


def expected_keys() -> Iterator[Key]:
    for kind in types():
        yield kind.name, f"decode.{kind.name}", "exact", "numpy-ggml"
    for kind in ROUNDED_TO:
        for name in ("x86", "generic") if kind.startswith("Q8") else ("x86",):
            yield kind, f"rounding.{kind}.{name}", "exact", "numpy-ggml"
    for model in MODELS:
        yield model, "file", "exact", "numpy-ggml"
        for backend in BACKENDS:
            for stage in (stage.name for stage in STAGES if stage.matrix):
                yield model, stage, "isolated", backend
                yield model, stage, "chained", backend
            for stage in INPUTS:
                yield model, stage, "chained", backend
            yield model, "logits", "decode", backend


@pytest.mark.parametrize("key", list(expected_keys()), ids=lambda key: "checkpoint_13-" + "-".join(key))
def test_checkpoint(key: Key):
    found = rows().get(key, [])
    assert found, f"{key}: no comparison was made"
    assert {row.checkpoint for row in found} == {"13"}
    bad = [row for row in found if row.verdict != PASS]
    assert not bad, f"{len(bad)} of {len(found)} rows fail, first: {bad[0]}"


def test_checkpoint_13_rows_are_all_looked_at():
    assert rows().keys() == set(expected_keys())


def test_checkpoint_13_covers_both_layers():
    in_layers = {stage.name for stage in STAGES if stage.in_layer}
    for (_, stage, mode, _), found in rows().items():
        if stage in in_layers and mode != "decode":
            assert {row.layer for row in found} == {0, 1}


def test_checkpoint_13_grants_products_alone_no_more_than_a_squared_error_of_1e_12():
    alone = [row for found in rows().values() for row in found if row.mode == "isolated"]
    assert max(row.tolerance for row in alone) <= 1e-6
    assert max(row.tolerance_worst for row in alone) <= 4e-6
    in_a_row = [row for found in rows().values() for row in found if row.mode == "chained"]
    assert max(row.tolerance for row in in_a_row) <= 3.01e-6  # nine products, whose errors are independent


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


def write_other(folder: Path) -> Path:
    """The model with one bit of one matrix turned."""
    path = write_model("Q1_0", folder)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    return path
