"""Known mistakes in the backward pass of experts and delta nets show, by far, in the gradients of the adapter."""

from typing import Any

import numpy as np
import pytest
from builders.families import SMALL, random_folder
from builders.family_adapters import family_adapter
from faults.situations import training_models_of

from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.planting import replaced
from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.training.numpy_step import document_gradients

pytestmark = pytest.mark.live  # transformers makes the models

IDS = np.array([3, 17, 8, 39, 0, 17, 52, 90, 4, 71, 33])
LIMIT = 1e-5  # relative, of a float32 gradient against PEFT's, by its Euclidean norm
MODELS = ("qwen2_moe", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    folder = tmp_path_factory.mktemp("bases")
    made = {name: random_folder(name, folder / name, 0, **SMALL[name]) for name in MODELS}
    return {name: open_weights(path).astype(np.float64, keep=True) for name, path in made.items()}


def gradients(weights: Weights) -> dict[str, np.ndarray]:
    adapter = family_adapter(weights.config)
    wanted, adapted = np.append(IDS[1:], -100), AdaptedWeights(weights, adapter)
    _, grads = document_gradients(IDS, wanted, adapted, label_smoothing=0.0, n_trained=10)
    return {name: grads[name] for name in adapter.flat()}


UNSHOWN = [mistake for mistake in TRAINING if not training_models_of(mistake)]


@pytest.mark.nightly_cases(but=["gradient-router-softmax-of-chosen"])
@pytest.mark.parametrize("mistake", UNSHOWN, ids=lambda mistake: mistake.name)
def test_a_mistake_moves_a_gradient_by_far(mistake: Mistake[Any], models: dict[str, Weights]):
    shown = [weights for weights in models.values() if mistake.applies_to(weights.config)]
    assert shown
    for weights in shown:
        right = gradients(weights)
        with replaced(mistake.part, mistake.wrong):
            wrong = gradients(weights)
        off = [np.linalg.norm(wrong[name] - right[name]) / np.linalg.norm(right[name]) for name in right]
        assert max(off) >= 10 * LIMIT
