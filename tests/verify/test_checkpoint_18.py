"""Checkpoint 18: norm, moments, parameters and learning rates, against the goldens of PEFT and torch."""

import numpy as np
import pytest
from planted_training import training_golden_of, weights_of
from training_rows import ON_CUDA, WIDE, backends, places, require_all, rows

from llorch.verify.training.goldens import MODELS
from llorch.verify.training.limits import ceiling
from llorch.verify.training.recipe import OPTIMIZER


@pytest.mark.parametrize(("backend", "model"), places("18"))
def test_checkpoint(backend: str, model: str):
    require_all("18", backend, model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", backends("18", ON_CUDA))
def test_checkpoint_18_on_cuda(backend: str, model: str):
    require_all("18", backend, model)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_18_clips_in_every_step(model: str):
    arrays = training_golden_of(model).arrays
    assert all(arrays[f"peft/step {step}/grad_norm"] > OPTIMIZER.max_norm for step in (1, 2, 10))


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_18_never_grants_more_than_a_fifth_of_a_learning_rate(model: str):
    alike = [row for row in rows(model, "numpy") if row.stage.startswith("parameters.")]
    assert max(row.tolerance_worst for row in alike) <= 0.2
    assert max(row.tolerance for row in alike) <= 0.02
    alone = [row for row in alike if row.mode == "isolated"]
    assert max(row.tolerance_worst for row in alone) <= 1e-3


@pytest.mark.parametrize("mode", ["isolated", "chained"])
def test_checkpoint_18_stored_tolerances_are_under_their_ceilings(mode: str):
    for model in MODELS:
        for stage, stored in training_golden_of(model).tolerances["float32"][mode].items():
            assert stored.at_most(ceiling(weights_of(model).config, stage, mode, "float32")) == stored


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_18_learning_rates_are_transformers_own_to_the_last_bits(model: str):
    alike = [row for row in rows(model, "numpy") if row.stage == "learning_rate" and row.backend != WIDE]
    assert {row.case for row in alike} == {"constant", "linear", "cosine"}
    assert max(row.tolerance for row in alike) == 1e-15
    assert np.finfo(np.float64).eps < 1e-15
