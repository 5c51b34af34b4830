"""Training dumps of experts and delta nets: what was left out of a gradient is named, at the first tensor it spoils."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.family_adapters import family_adapter
from faults.situations import training_models_of
from helpers.stored_goldens import training_weights_of
from helpers.without_gaps import without_gaps

from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.planting import injected
from llorch.diagnosis.training.diagnose import diagnose_training
from llorch.diagnosis.verdict import Finding
from llorch.engines.dumps.index import open_raw
from llorch.judging.goldens.training_recipe import StoredBatch
from llorch.training.numpy_step import loss_and_gradients

MODELS = ("micro-qwen2-moe", "micro-qwen3-moe", "micro-qwen3.5")
ROWS = StoredBatch([[3, 17, 8, 39, 0, 17, 52, 90, 4, 71, 33], [5, 6, 7, 8, 9, 10, 11]], [1, 3])
UNSHOWN = [mistake for mistake in TRAINING if not training_models_of(mistake)]
FIRST = {"micro-qwen2-moe": "l1.", "micro-qwen3-moe": "l1.", "micro-qwen3.5": "l0."}  # the last layer that has it


def able(mistake: Mistake[Any]) -> str:
    return next(model for model in MODELS if mistake.applies_to(training_weights_of(model).config))


def found_in(model: str, folder: Path, *mistakes: Mistake[Any]) -> list[Finding]:
    """Findings in a dump of one step, its ids, loss and gradients."""
    weights, batch = training_weights_of(model), ROWS.batch()
    adapter = family_adapter(weights.config)
    with injected(*mistakes):
        loss, grads = loss_and_gradients(weights.astype(np.float64, keep=True), adapter, [batch], label_smoothing=0.0)
    arrays = {f"step1.grad.{name}": grads[name].astype(np.float32) for name in adapter.flat()}
    tokens = {"input_ids": batch.ids, "labels": batch.labels, "attention_mask": (batch.positions >= 0).astype(int)}
    arrays |= {f"step1.{name}": array for name, array in tokens.items()} | {"step1.loss": np.asarray(loss)}
    path = folder / "dump.npz"
    np.savez(path, allow_pickle=False, **arrays)
    with without_gaps():
        return list(diagnose_training(weights, adapter, open_raw(path)).findings)


@pytest.mark.slow_cases(but=["micro-qwen3-moe"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_right_is_not_accused(model: str, tmp_path: Path):
    assert found_in(model, tmp_path) == []


@pytest.mark.slow
@pytest.mark.nightly_cases(but=["*-state-cut-*"])
@pytest.mark.parametrize("mistake", UNSHOWN, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_gradient_is_named(mistake: Mistake[Any], tmp_path: Path):
    (finding,) = found_in(able(mistake), tmp_path, mistake)
    assert [suspect.name for suspect in finding.suspects] == [mistake.name]
    assert finding.key.startswith(FIRST[able(mistake)])
