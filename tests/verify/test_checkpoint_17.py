"""Checkpoint 17: gradients of every adapter tensor and of every block input, against the goldens of PEFT and torch."""

import pytest
from planted_training import training_golden_of, weights_of
from training_rows import ON_CUDA, backends, places, require_all, rows

from llorch.verify.training.goldens import MODELS


@pytest.mark.parametrize(("backend", "model"), places("17"))
def test_checkpoint(backend: str, model: str):
    require_all("17", backend, model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", backends("17", ON_CUDA))
def test_checkpoint_17_on_cuda(backend: str, model: str):
    require_all("17", backend, model)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_17_golden_with_b_zero_has_no_gradient_for_a(model: str):
    arrays = training_golden_of(model).arrays
    found = {name: array for name, array in arrays.items() if name.startswith("peft/zero_b/")}
    assert len(found) == 14 * weights_of(model).config.n_layers
    assert all(bool(array.any()) == name.endswith("lora_B") for name, array in found.items())


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_17_grants_no_error_to_gradients_that_are_zero(model: str):
    alike = [row for row in rows(model, "numpy") if row.case == "zero_b" and row.stage.endswith("lora_A")]
    assert alike
    assert {(row.error, row.truth_error, row.producer_error) for row in alike} == {(0.0, 0.0, 0.0)}
