"""The backward page of the families against finite differences of the forward pages: every stage, every tensor."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from builders.families import SMALL, random_folder
from builders.family_adapters import family_adapter

from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.model.backward import recorder
from llorch.model.blocks import forward
from llorch.model.blocks.backward import backward
from llorch.model.cache import KVCache
from llorch.ops.cross_entropy import cross_entropy, cross_entropy_backward
from llorch.stages.table import keys

pytestmark = pytest.mark.live  # transformers makes the models

IDS = np.array([3, 17, 8, 39, 0, 17, 52, 90, 4, 71, 33])
WANTED = np.array([17, -100, 39, 0, 25, -100, 90, 4, 71, 33, -100])
STEP = 1e-6
NO_GRADIENT = ("topk_ids", "conv_state", "delta_state")


@pytest.fixture(scope="module", params=SMALL)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = random_folder(request.param, tmp_path_factory.mktemp("base"), 0, **SMALL[request.param])
    return open_weights(folder).astype(np.float64, keep=True)


@pytest.fixture(scope="module")
def adapter(weights: Weights) -> Adapter:
    return family_adapter(weights.config)


def loss(weights: Weights, moved: Mapping[str, np.ndarray]) -> float:
    """The loss when some stages are off by a little."""
    cache = KVCache(weights.config, weights.dtype)
    logits = forward(IDS, weights, cache, keep=lambda name, array: array + moved.get(name, 0))
    total, n_trained = cross_entropy(logits, WANTED, label_smoothing=0.1)
    return total / n_trained


def traced(weights: Weights) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All stages, and the gradients by them."""
    trace: dict[str, np.ndarray] = {}
    logits = forward(IDS, weights, KVCache(weights.config, weights.dtype), keep=recorder(trace))
    d_logits = cross_entropy_backward(logits, WANTED, label_smoothing=0.1, n_trained=8)
    return trace, backward(d_logits, IDS, trace, weights)


def assert_change(loss_above: float, loss_below: float, expected: float, name: str) -> None:
    assert (loss_above - loss_below) / (2 * STEP) == pytest.approx(expected, rel=1e-5, abs=5e-8), name


@pytest.mark.nightly_cases(but=["smollm3"])
def test_the_gradient_of_every_stage_is_how_the_loss_changes_when_the_stage_does(weights, adapter, rng):
    run = AdaptedWeights(weights, adapter)
    trace, grads = traced(run)
    none = {name for name, stage, _ in keys(weights.config) if stage.name in NO_GRADIENT}
    inputs = {f"l{layer}.block_in" for layer in range(weights.config.n_layers)}
    assert grads.keys() == (trace.keys() - none) | inputs | adapter.flat().keys()
    for name in sorted(trace.keys() - none):
        assert grads[name].shape == trace[name].shape
        direction = rng.normal(size=trace[name].shape) * STEP
        expected = float((grads[name] * direction).sum()) / STEP
        assert_change(loss(run, {name: direction}), loss(run, {name: -direction}), expected, name)


def test_the_gradient_of_every_tensor_is_how_the_loss_changes_when_the_tensor_does(weights, adapter, rng):
    _, grads = traced(AdaptedWeights(weights, adapter))
    start = {name: array.astype(np.float64) for name, array in adapter.flat().items()}
    for name, array in start.items():
        assert np.abs(grads[name]).max() > 1e-9, name
        direction = rng.normal(size=array.shape) * STEP
        ahead, behind = (
            loss(AdaptedWeights(weights, adapter, parameters=start | {name: array + way * direction}), {})
            for way in (1, -1)
        )
        assert_change(ahead, behind, float((grads[name] * direction).sum()) / STEP, name)


def test_what_keep_gives_back_goes_on_down_in_every_part(weights, adapter):
    """Twice the gradient of what a part makes is twice that of all below, and of the tensors that it passes."""
    run = AdaptedWeights(weights, adapter)
    trace, grads = traced(run)
    d_logits = cross_entropy_backward(trace["logits"], WANTED, label_smoothing=0.1, n_trained=8)
    last = f"l{weights.config.n_layers - 1}.block_out"
    found = backward(d_logits, IDS, trace, run, keep=lambda key, array: 2 * array if key == last else array)
    for key, array in grads.items():
        times = 1 if key in ("logits", "final_norm") else 2
        np.testing.assert_allclose(found[key], times * array, rtol=1e-12, atol=1e-18, err_msg=key)


def test_dora_and_dropout_go_through_the_joined_matrices_of_qwen3_next(tmp_path: Path, rng):
    folder = random_folder("qwen3_next", tmp_path, 0, **SMALL["qwen3_next"])
    weights = open_weights(folder).astype(np.float64, keep=True)
    chosen = ("in_proj_qkvz", "in_proj_ba", "out_proj")
    adapter = family_adapter(weights.config, target_modules=chosen, target_parameters=(), use_dora=True)
    masks = {name: (rng.random((len(IDS), t.n_in)) < 0.75) / 0.75 for name, t in adapter.targets.items()}
    start = {name: array.astype(np.float64) for name, array in adapter.flat().items()}

    def run(parameters: Mapping[str, np.ndarray]) -> AdaptedWeights:
        return AdaptedWeights(weights, adapter, parameters=parameters, masks=masks)

    name = "layers.0.in_proj_qkvz.magnitude"
    _, grads = traced(run(start))
    direction = rng.normal(size=start[name].shape) * STEP
    ahead, behind = (loss(run(start | {name: start[name] + way * direction}), {}) for way in (1, -1))
    assert_change(ahead, behind, float((grads[name] * direction).sum()) / STEP, name)
