"""The backward page against finite differences of the forward page: every stage, every tensor; what must be zero."""

from collections.abc import Mapping

import numpy as np
import pytest
from builders.random_adapters import EVERY, random_adapter, tiny_base
from helpers.refusals import refuses

from llorch.files import Weights, open_weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.model.backward import backward, recorder
from llorch.model.blocks import forward
from llorch.model.blocks.backward import backward as backward_of_every_family
from llorch.model.cache import KVCache
from llorch.ops.cross_entropy import cross_entropy, cross_entropy_backward
from llorch.runtime import builtin
from llorch.stages.table import keys

IDS = np.array([3, 17, 8, 39, 0, 17])
WANTED = np.array([17, -100, 39, 0, 25, -100])
STEP = 1e-5
KINDS = {"llama": ("llama", False), "tied qwen2": ("qwen2", True), "qwen3": ("qwen3", False)}


@pytest.fixture(scope="module", params=KINDS)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    family, tied = KINDS[request.param]
    return open_weights(tiny_base(tmp_path_factory.mktemp("base"), family, tied=tied)).astype(np.float64)


@pytest.fixture(scope="module")
def adapter(weights: Weights) -> Adapter:
    return random_adapter(weights.config, target_modules=(*EVERY, "embed_tokens", "lm_head"))


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
    d_logits = cross_entropy_backward(logits, WANTED, label_smoothing=0.1, n_trained=4)
    return trace, backward(d_logits, IDS, trace, weights)


@pytest.mark.slow_cases(but=["llama-False", "tied qwen2-True"])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_gradient_of_every_stage_is_how_the_loss_changes_when_the_stage_does(weights, adapter, rng, adapted):
    run = AdaptedWeights(weights, adapter) if adapted else weights
    trace, grads = traced(run)
    for name, _, _ in keys(weights.config):
        assert grads[name].shape == trace[name].shape
        direction = rng.normal(size=trace[name].shape) * STEP
        change = loss(run, {name: direction}) - loss(run, {name: -direction})
        expected = float((grads[name] * direction).sum()) / STEP
        assert change / (2 * STEP) == pytest.approx(expected, rel=1e-5, abs=1e-7), name


def test_the_gradient_of_every_tensor_is_how_the_loss_changes_when_the_tensor_does(weights, adapter, rng):
    _, grads = traced(AdaptedWeights(weights, adapter))
    start = {name: array.astype(np.float64) for name, array in adapter.flat().items()}
    for name, array in start.items():
        direction = rng.normal(size=array.shape) * STEP
        ahead, behind = (
            loss(AdaptedWeights(weights, adapter, parameters=start | {name: array + way * direction}), {})
            for way in (1, -1)
        )
        expected = float((grads[name] * direction).sum()) / STEP
        assert (ahead - behind) / (2 * STEP) == pytest.approx(expected, rel=1e-5, abs=1e-7), name


def test_what_is_returned_is_every_stage_every_block_input_and_every_tensor_and_no_frozen_weight(weights, adapter):
    trace, grads = traced(AdaptedWeights(weights, adapter))
    block_inputs = {f"l{layer}.block_in" for layer in range(weights.config.n_layers)}
    assert grads.keys() == trace.keys() | block_inputs | adapter.flat().keys()
    for name, array in adapter.flat().items():
        assert grads[name].shape == array.shape
    np.testing.assert_array_equal(grads["l0.block_in"], grads["embed"])
    np.testing.assert_array_equal(grads["l1.block_in"], grads["l0.block_out"])


def test_rows_after_the_last_learned_one_get_no_gradient_in_any_stage(weights, adapter):
    trace, _ = traced(AdaptedWeights(weights, adapter))
    d_logits = np.zeros_like(trace["logits"])
    d_logits[2] = np.linspace(-1, 1, d_logits.shape[1])
    grads = backward(d_logits, IDS, trace, AdaptedWeights(weights, adapter))
    for name, stage, _ in keys(weights.config):
        by_token = grads[name].swapaxes(0, stage.axes.split().index("ctx" if "cache" in name else "seq"))
        assert by_token[:3].any(), name
        assert not by_token[3:].any(), name


@pytest.mark.parametrize(("name", "above"), [("l1.block_out", ()), ("l1.block_in", ("l1.", "layers.1."))])
def test_what_keep_gives_back_goes_on_down(weights, adapter, name, above):
    adapted = AdaptedWeights(weights, adapter)
    trace, grads = traced(adapted)
    d_logits = cross_entropy_backward(trace["logits"], WANTED, label_smoothing=0.1, n_trained=4)
    twice = lambda key, array: 2 * array if key == name else array  # noqa: E731
    found = backward(d_logits, IDS, trace, adapted, keep=twice)
    assert found.keys() == grads.keys()
    for key, array in grads.items():
        as_before = key.startswith(("lm_head", "logits", "final_norm", *above)) and key != name
        np.testing.assert_array_equal(found[key], array if as_before else 2 * array, err_msg=key)


def test_an_adapter_on_one_layer_trains_that_layer_alone_and_the_gradient_goes_on_below_it(weights):
    adapter = random_adapter(weights.config, layers_to_transform=(1,))
    _, grads = traced(AdaptedWeights(weights, adapter))
    assert {name for name in grads if ".lora_" in name} == adapter.flat().keys()
    assert grads["l0.block_in"].any()


def test_backward_changes_neither_trace_nor_weights(weights, adapter):
    adapted = AdaptedWeights(weights, adapter)
    trace, _ = traced(adapted)
    before = {name: array.copy() for name, array in trace.items()}
    frozen = {name: weights.array(name).copy() for name in weights}
    backward(np.ones_like(trace["logits"]), IDS, trace, adapted)
    for name, array in before.items():
        np.testing.assert_array_equal(trace[name], array, err_msg=name)
    for name, array in frozen.items():
        np.testing.assert_array_equal(weights.array(name), array, err_msg=name)


@pytest.mark.parametrize("name", builtin.installed_models(builtin.EVERY))
def test_backward_alone_on_a_built_in_model_is_right_or_refused(name: str):
    weights, trace = open_weights(builtin.builtin_path(name)), dict[str, np.ndarray]()
    d_logits = forward(IDS, weights, KVCache(weights.config, weights.dtype), keep=recorder(trace))
    if name in builtin.BUILTIN:
        grads, expected = (f(d_logits, IDS, trace, weights) for f in (backward, backward_of_every_family))
        assert list(grads) == list(expected)
        for stage, grad in grads.items():
            np.testing.assert_array_equal(grad, expected[stage], strict=True)
        return
    with refuses(ValueError, "llorch.model.blocks.backward.backward", weights.config.family):
        backward(d_logits, IDS, trace, weights)
