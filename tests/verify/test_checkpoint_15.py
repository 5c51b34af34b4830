"""Checkpoint 15: what the adapter adds to every matrix, against the goldens of PEFT and torch."""

import numpy as np
import pytest
from planted_training import training_golden_of, weights_of
from training_rows import ON_CUDA, backends, places, require_all, rows

from llorch.verify.training.goldens import MODELS
from llorch.verify.training.recipe import LORA, RSLORA, make_adapter


@pytest.mark.parametrize(("backend", "model"), places("15"))
def test_checkpoint(backend: str, model: str):
    require_all("15", backend, model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", backends("15", ON_CUDA))
def test_checkpoint_15_on_cuda(backend: str, model: str):
    require_all("15", backend, model)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_15_has_an_adapter_in_which_nothing_is_like_anything_else(model: str):
    config = weights_of(model).config
    adapter = training_golden_of(model).adapter_for(config)
    assert all(array.any() for array in adapter.flat().values())
    of_a_layer = [adapter.scaling(name) for name in adapter.targets if name.startswith("layers.0.")]
    assert len(of_a_layer) == 7
    assert len(set(of_a_layer)) == 7
    assert 1.0 not in of_a_layer
    assert {LORA.rank_of(target) for target in adapter.targets.values()} == {2, 3, 4}
    stable = training_golden_of(model).adapter_for(config, RSLORA)
    assert all(stable.scaling(name) != adapter.scaling(name) for name in adapter.targets)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_15_has_the_adapter_of_the_recipe(model: str):
    made, stored = (
        make_adapter(weights_of(model).config).flat(),
        training_golden_of(model).adapter_for(weights_of(model).config).flat(),
    )
    assert made.keys() == stored.keys()
    assert all(np.array_equal(made[name], stored[name]) for name in made)


@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_15_covers_all_matrices_of_all_layers(model: str):
    found = {(row.layer, row.stage) for row in rows(model, "numpy") if row.stage.startswith("lora_delta.")}
    assert len(found) == 7 * weights_of(model).config.n_layers
