"""Checkpoint 19: the loss of a whole run, against the goldens of PEFT and torch."""

import pytest
from planted_training import training_golden_of, weights_of
from training_rows import ON_CUDA, backends, places, require_all, rows

from llorch.verify.training.goldens import MODELS
from llorch.verify.training.recipe import CURVE


@pytest.mark.parametrize(("backend", "model"), places("19"))
def test_checkpoint(backend: str, model: str):
    require_all("19", backend, model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", backends("19", ON_CUDA))
def test_checkpoint_19_on_cuda(backend: str, model: str):
    require_all("19", backend, model)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_19_is_a_run_that_learns(model: str):
    curve = training_golden_of(model).arrays["peft/curve/loss_curve"]
    assert curve.shape == (CURVE.n_steps,)
    assert curve[-3:].mean() < 0.5 * curve[:3].mean()


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_19_clips_some_steps_and_not_others(model: str):
    norms = training_golden_of(model).arrays["peft/curve/norm_curve"]
    assert (norms > CURVE.optimizer.max_norm).any()
    assert (norms < CURVE.optimizer.max_norm).any()


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_19_is_tight(model: str):
    alike = [row for row in rows(model, "numpy") if row.stage == "loss_curve"]
    assert max(row.tolerance for row in alike) < 2e-6
    assert weights_of(model).config.n_layers > 1
