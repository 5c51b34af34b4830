"""Checkpoint 20: merged matrices, and files that others load, against the stored goldens of PEFT and llama.cpp."""

import shutil
from pathlib import Path

import pytest
from planted_training import training_golden_of, weights_of
from training_rows import places, require_all, rows

from llorch.builtin import goldens_folder
from llorch.verify.training.claims import verify_training_stored
from llorch.verify.training.exports import EXPORTS
from llorch.verify.training.goldens import FILES, MODELS
from llorch.verify.training.places import LOADED_BY


@pytest.mark.parametrize(("backend", "model"), places("20"))
def test_checkpoint(backend: str, model: str):
    require_all("20", backend, model)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_20_compares_every_form_with_the_engine_that_loads_it(model: str):
    found = {(row.stage, row.producer) for row in rows(model, "numpy") if row.stage.startswith("exported_logits.")}
    assert found == {(f"exported_logits.{kind}", LOADED_BY[kind]) for kind in EXPORTS}


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_20_looks_at_every_tensor_of_adapter_files(model: str):
    golden = training_golden_of(model)
    n_tensors = len(golden.adapter_for(weights_of(model).config).flat())
    assert len(golden.files["peft_folder"]) == n_tensors
    assert len(golden.files["lora_gguf"]) == n_tensors + 1  # and its alpha
    assert golden.files["lora_gguf"]["adapter.lora.alpha"] == "none"  # scales differ, so they are in B


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_20_says_which_adapter_file_nobody_else_wrote(model: str):
    found = {row.stage: row.producer for row in rows(model, "numpy") if row.mode == "exact"}
    assert found == {"adapter_file.peft_folder": "peft", "adapter_file.lora_gguf": "ours"}


def test_goldens_of_checkpoints_15_to_20_are_small():
    sizes = [(goldens_folder() / model / name).stat().st_size for model in MODELS for name in FILES]
    assert sum(sizes) < 9_000_000


@pytest.mark.parametrize("missing", FILES)
def test_checkpoints_15_to_20_fail_without_a_golden(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(goldens_folder() / MODELS[0], tmp_path / MODELS[0])
    (tmp_path / MODELS[0] / missing).unlink()
    monkeypatch.setattr("llorch.verify.training.claims.goldens_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{missing} is missing; make it with reference_outputs/regenerate"):
        list(verify_training_stored(MODELS[0]))


def test_goldens_of_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(goldens_folder() / MODELS[0], tmp_path / MODELS[1])
    monkeypatch.setattr("llorch.verify.training.claims.goldens_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match="made for other weights"):
        list(verify_training_stored(MODELS[1]))
