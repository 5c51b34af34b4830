"""Teeth: every known mistake turns its checkpoint red by far and is named; what is right is never accused.

Each is a test of its checkpoint, too: `pytest -k checkpoint_{number}`.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
from inject.planted import (
    MICRO,
    Situation,
    by_name,
    chain,
    first_failing,
    golden_of,
    models_of,
    n_cached,
    named_by,
    right,
    situations,
    suite_of,
    weights_of,
)

from llorch.builtin import OTHERS
from llorch.comparison import EXACT, measure
from llorch.diagnosis.mistakes import GENERATION, SAMPLING, STAGE_MISTAKES, GenerationInputs, Mistake, SamplerInputs
from llorch.diagnosis.mistakes.generation import right as right_loop
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.diagnosis.mistakes.variants import VISIBLE, Variants, sampler_variants, variants
from llorch.stages import BY_NAME, keys
from llorch.verify.goldens import PRODUCERS, SAMPLINGS, sampler_inputs

SHOWN = [mistake for mistake in STAGE_MISTAKES if models_of(mistake)]  # the others in `test_teeth_layers.py`
TWINS = {  # the same numbers in one stage of one layer
    "rope-missing": {"rope-position-frozen"},  # from position 0 on
    "chunk-ignored": {"chunk-taken-for-window"},  # of fewer tokens than a chunk has
    "rope-in-every-layer": {"rope-missing-one-layer-early"},
    "rope-missing-one-layer-early": {
        "rope-in-every-layer", "cache-keys-before-rope", "rope-missing", "rope-position-frozen",
    },
}  # fmt: skip


def test_red_is_ten_times_the_tolerance():
    assert VISIBLE == 10


@pytest.mark.parametrize("mistake", SHOWN, ids=by_name)
def test_mistake_goes_red_at_its_stage_and_is_named(mistake: Mistake[StageInputs]):
    planted = {(where.producer, where.stage_name, where.case) for where in situations(mistake)}
    assert planted == {(p, stage, case) for p in PRODUCERS for stage in mistake.stages for case in mistake.cases}
    for where in situations(mistake):
        made = where.made()
        wrong = next(array for known, array in made.wrong if known is mistake)
        over = measure(wrong, where.golden, masked=where.stage.masked).over(where.tolerance)
        assert over >= VISIBLE, f"{where}: {over:.1f} times the tolerance"
        names, twins = named_by(wrong, made, where.tolerance), TWINS.get(mistake.name, set())
        assert {mistake.name} <= {*names} <= {mistake.name, *twins}, f"{where}: named {names}"


@pytest.mark.parametrize("mistake", SHOWN, ids=by_name)
def test_mistake_in_a_chain_is_the_first_stage_to_fail(mistake: Mistake[StageInputs]):
    case = mistake.cases[0]
    for model in models_of(mistake):
        suite, whole = suite_of(model), golden_of(model).cases[case]
        for name in (name for name in mistake.stages if BY_NAME[name].applies_to(suite.weights.config)):
            with np.errstate(all="ignore"):  # what comes after a mistake may be infinite or no number
                trace = chain(mistake, suite.weights, whole, name)
            expected = "k_cache" if name == "v_cache" and "k_cache" in mistake.stages else name
            place = expected, mistake.first_layer(expected, suite.weights.config)
            for producer in golden_of(model).evidence:
                assert first_failing(trace, suite, case, producer, n_cached(mistake, whole)) == place, model


@pytest.mark.plain_cases("micro-llama3-far", "micro-llama3-near", "micro-qwen3-near", "micro-qwen3.5-far")
@pytest.mark.parametrize("case", ["near", "far"])
@pytest.mark.parametrize("model", MICRO + OTHERS)
def test_what_a_producer_made_is_never_accused(model: str, case: str):
    golden, weights = golden_of(model), weights_of(model)
    for producer, evidence in golden.evidence.items():
        (other,) = set(PRODUCERS) - {producer}
        for key, stage, layer in keys(weights.config):
            alone = right(model, case, producer, 0)[key]
            made = variants(stage, layer, evidence.traces[case], weights, golden.cases[case], alone)
            tolerance = suite_of(model).limits(case).isolated(key)
            assert named_by(evidence.traces[case][key], made, tolerance) == []
            foreign = golden.evidence[other].traces[case][key]  # made from slightly other inputs
            assert named_by(foreign, made, tolerance) == []


@pytest.mark.parametrize("model", MICRO)
def test_an_unknown_mistake_gets_no_name(model: str, rng: np.random.Generator):
    for stage in (stage for stage in BY_NAME.values() if stage.applies_to(weights_of(model).config)):
        where = Situation(model, "near", "llamacpp", stage.name, stage.first_layer(weights_of(model).config), 0)
        made = where.made()
        noise = 1 + 1e-3 * rng.standard_normal(made.right.shape).astype(np.float32)
        assert named_by(made.right * noise, made, where.tolerance) == []


@pytest.mark.parametrize("mistake", SAMPLING, ids=by_name)
def test_mistake_after_the_logits_goes_red_and_is_named(mistake: Mistake[SamplerInputs]):
    (step,) = mistake.stages
    for model, producer, case in product(MICRO, PRODUCERS, mistake.cases):
        suite, where = suite_of(model), f"{model} {producer} {case}"
        last = suite.limits("near").last_row()
        tolerance = {"argmax": EXACT, "probabilities": suite.softmax_limit(), "selected_logits": last}[step]
        inputs, want = sampler_case(model, producer, step, case)
        wrong = mistake.result(inputs, step)
        assert measure(wrong, want).over(tolerance) >= VISIBLE, where
        made = sampler_variants(step, inputs, weights_of(model).config)
        assert named_by(wrong, made, tolerance) == [mistake.name], where
        assert named_by(want, made, tolerance) == []


def sampler_case(model: str, producer: str, step: str, case: str) -> tuple[SamplerInputs, np.ndarray]:
    """What a step reads, and what the producer made of it (at a tie: the lowest id, which design states)."""
    golden = golden_of(model)
    evidence, ids = golden.evidence[producer], golden.cases["near"].ids
    selected = evidence.selected_logits
    if step == "selected_logits":
        return SamplerInputs(evidence.traces["near"]["logits"], SAMPLINGS["all"], ids), selected
    if step == "argmax":
        row = selected.copy()
        best = int(np.argmax(row))
        if case == "tie":
            row[best + 1 :: 7] = row[best]
        return SamplerInputs(row[None], SAMPLINGS["all"], ids), np.asarray([best])
    logits, history = sampler_inputs(ids, selected.size)
    return SamplerInputs(logits[None], SAMPLINGS[case], history), evidence.probabilities[case]


@pytest.mark.parametrize("mistake", GENERATION, ids=by_name)
def test_mistake_in_the_loop_is_named_by_its_text(mistake: Mistake[GenerationInputs]):
    """Text is a weak oracle: a trained model may forgive a token too many, but no text names another mistake."""
    shown = [shown_by_text(mistake, model) for model in MICRO]
    assert any(shown)


def shown_by_text(mistake: Mistake[GenerationInputs], model: str) -> bool:
    wrong = next(text for known, text in texts(model).wrong if known is mistake)
    names = named_by(wrong, texts(model), EXACT)
    assert names == ([] if np.array_equal(wrong, greedy(model)) else [mistake.name])
    return names != []


@pytest.mark.parametrize("model", MICRO)
def test_the_right_loop_writes_what_the_producers_write(model: str):
    np.testing.assert_array_equal(texts(model).right, greedy(model))


def greedy(model: str) -> np.ndarray:
    return golden_of(model).evidence["llamacpp"].greedy


@cache
def texts(model: str) -> Variants:
    loop = GenerationInputs(weights_of(model), golden_of(model).cases["near"].ids, len(greedy(model)))
    return Variants(right_loop(loop), [(mistake, mistake.result(loop, "generation")) for mistake in GENERATION])
