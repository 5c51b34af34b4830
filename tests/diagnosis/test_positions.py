"""Dumps of models whose layers treat positions each in its way: what was planted is named, in the layers it is in."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from builders.raw_dumps import raw_dump
from faults.situations import models_of
from faults.wrong_dumps import BLOCKS, WHOLE, dump_run, everywhere, float64_weights, mistake, passes
from helpers.refusals import assert_tells
from helpers.stored_goldens import golden_of

from llorch.diagnosis.diagnose import diagnose, findings
from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.cache import LAYERS
from llorch.diagnosis.mistakes.positions import POSITIONS
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.diagnosis.replay import UNCHANGED, Change, StageChange
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.families.config import YarnScaling
from llorch.families.layers import Layer
from llorch.stages.table import BY_NAME, key, keys

INJECTED = [pytest.param(each, model, id=f"{each.name}-{model}") for each in (*POSITIONS, *LAYERS)
           for model in models_of(each)]  # fmt: skip


@pytest.mark.slow_cases(but=[
    "rope-in-every-layer-micro-smollm3", "shared-expert-of-llama4-*", "temperature-on-keys-micro-ministral3",
    "temperature-one-position-late-micro-llama4",
])  # fmt: skip
@pytest.mark.parametrize(("injected", "model"), INJECTED)
def test_injected_mistake_is_named_as_the_cause(injected: Mistake[StageInputs], model: str):
    weights, stages = (
        float64_weights(model),
        [stage for stage in injected.stages if BY_NAME[stage].applies_to(float64_weights(model).config)],
    )
    first = golden_of(model).cases[injected.cases[0]].first_position
    change = everywhere(mistake(injected.name, model), weights)
    found = list(findings(weights, dump_run(model, passes(model, first_position=first), change)))
    assert [cause.name for each in found for cause in each.causes] == [injected.name]
    assert found[0].key in {key(stage, injected.first_layer(stage, weights.config)) for stage in stages}


TAKEN: dict[str, tuple[int, Callable[[Sequence[Layer], int], Layer]]] = {  # where a text begins; what layers are then
    "rope-missing-one-layer-early": (0, lambda layers, i: layers[i - 1]),
    "rope-in-every-layer": (0, lambda layers, i: layers[0]),
    "chunk-ignored": (8188, lambda layers, i: replace(layers[i], chunk=None)),
    "chunk-in-every-layer": (8188, lambda layers, i: replace(layers[i], chunk=8192)),
    "temperature-in-every-layer": (8188, lambda layers, i: replace(layers[i], has_attention_temperature=True)),
}


@pytest.mark.nightly_cases(but=["chunk-ignored-whole", "rope-in-every-layer-whole"])
@pytest.mark.parametrize("is_dumped", [WHOLE, pytest.param(BLOCKS, marks=pytest.mark.nightly)], ids=["whole", "blocks"])
@pytest.mark.parametrize("name", TAKEN)
def test_an_engine_that_takes_layers_for_others_is_told_so(name: str, is_dumped: Callable[[str], bool]):
    """It runs as Llama 4 does, with another list of layers; stages that this model has not are not in its dump."""
    model, (first, other) = "micro-llama4", TAKEN[name]
    config = float64_weights(model).config
    layers = tuple(replace(other(config.layers, i), experts=layer.experts) for i, layer in enumerate(config.layers))
    taken = Change(setting=lambda setting: replace(setting, config=replace(config, layers=layers)))
    there = {place for place, _, _ in keys(config)}
    dump = dump_run(
        model, passes(model, first_position=first), taken, lambda place: place in there and is_dumped(place)
    )
    (found,) = findings(float64_weights(model), dump)
    assert [cause.name for cause in found.causes] == [name]


def turned_by_divided_positions(inputs: StageInputs, stage: str, array: np.ndarray) -> np.ndarray:
    """Rotate by complex numbers, as Meta's code does, with positions divided by four."""
    first, second = np.split(inputs.heads(f"{stage[0]}_proj"), 2, axis=-1)
    n_pairs = first.shape[-1]
    angle = inputs.positions[:, None, None] / 4 * inputs.config.rope_theta ** -(np.arange(n_pairs) / n_pairs)
    turned = (first + 1j * second) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(array.dtype)


def test_divided_positions_are_named():
    weights = float64_weights("story")
    places = [key(stage, layer) for layer in range(weights.config.n_layers) for stage in ("q_rope", "k_rope")]
    divided = Change(dict.fromkeys(places, StageChange(turned_by_divided_positions)))
    (found,) = findings(weights, dump_run("story", passes("story"), divided, BLOCKS))
    assert [(cause.name, cause.value) for cause in found.causes] == [("rope-position-factor", "4")]


@pytest.mark.slow
def test_hypotheses_that_exclude_each_other_are_no_crash():
    """Where no single one explains an error pairs are tried: a mistake of YaRN beside one that leaves YaRN out."""
    dump = dump_run("micro-ministral3", passes("micro-ministral3"), is_dumped=lambda place: place == "logits")
    at = (0, "logits")
    noise = np.random.default_rng(0).standard_normal(dump.dumped[at].read().shape).astype(np.float32)
    dump = replace(dump, dumped={at: replace(dump.dumped[at], read=lambda: noise)})
    assert [found.kind for found in findings(float64_weights("micro-ministral3"), dump)] == ["unknown"]


@pytest.mark.parametrize("name", ["", "rope-in-every-layer", "rope-missing-one-layer-early"])
def test_heads_that_an_engine_calls_rotated_in_a_layer_without_rope_are_left_out(name: str):
    model = "micro-smollm3"
    weights, (tokens,) = float64_weights(model), passes(model)
    change = everywhere(mistake(name, model), weights) if name else UNCHANGED
    shown = {key: dumped_arrays.read() for key, dumped_arrays in dump_run(model, [tokens], change).of_pass(0)}
    for which in "qk":
        shown[f"l3.{which}_rope"] = shown[f"l3.{which}_proj"].reshape(len(tokens.ids), -1, weights.config.head_dim)
    dump = stage_dump(raw_dump(shown, tokens.ids), weights.config, weights=weights)
    assert_tells("; ".join(dump.notes), "q_rope", "k_rope", "layer 3")
    assert [cause.name for found in findings(weights, dump) for cause in found.causes] == ([name] if name else [])


def folded(model: str, *, compensated: bool) -> Change:
    """YaRN's gain left out of cosines and sines; with it squared in the scale of the scores if it is compensated."""
    yarn = float64_weights(model).config.rope_scaling
    assert isinstance(yarn, YarnScaling)
    gain = yarn.attention_factor
    assert abs(gain - 1) > 0.01
    forgotten = everywhere(mistake("yarn-gain-forgotten", model), float64_weights(model))
    scores = [key for key, stage, _ in keys(float64_weights(model).config) if stage.name == "attn_scores"]
    scaled = StageChange(lambda inputs, stage, array: array * (gain**2 if compensated else 1))
    return Change({**forgotten.replaced_stages, **dict.fromkeys(scores, scaled)})


@pytest.mark.parametrize("hidden", [(), ("attn_scores", "attn_probs"), ("q_rope", "attn_scores", "q_tempered")])
def test_yarn_gain_in_the_scale_of_the_scores_is_no_mistake(hidden: tuple[str, ...]):
    model = "micro-ministral3"
    shown = lambda key: not key.endswith(hidden) if hidden else True  # noqa: E731
    dump = dump_run(model, passes(model, 8, 4), folded(model, compensated=True), shown)
    found = diagnose(float64_weights(model), dump)
    assert found.findings == []
    assert_tells("; ".join(found.notes), "YaRN")


@pytest.mark.parametrize("suffix", ["", "l0.q_rope"])  # queries alone cannot show that something makes up for it
def test_yarn_gain_that_nothing_makes_up_for_is_named(suffix: str):
    model = "micro-ministral3"
    dump = dump_run(model, passes(model), folded(model, compensated=False), lambda key: key.endswith(suffix))
    assert [each.name for found in findings(float64_weights(model), dump) for each in found.causes] == [
        "yarn-gain-forgotten"
    ]


def test_inverse_frequencies_of_zero_are_one_cause_in_all_passes():
    model = "micro-ministral3"
    change = everywhere(mistake("rope-frequencies-zero", model), float64_weights(model))
    (found,) = findings(float64_weights(model), dump_run(model, passes(model, 7, 4, 1), change))
    assert (found.n_pass, found.key, found.causes[0].name) == (0, "l0.q_rope", "rope-frequencies-zero")
