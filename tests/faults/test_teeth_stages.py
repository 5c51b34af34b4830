"""Every known mistake turns its checkpoint red by far and is named; right code is never accused.

Each is a test of its checkpoint, too: `pytest -k checkpoint_{number}`.
"""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from faults.situations import (
    MICRO,
    QuantisedSituation,
    Situation,
    by_name,
    chain,
    first_failing,
    models_of,
    n_cached,
    named_by,
    right,
    situations,
)
from helpers.stored_goldens import golden_of, suite_of, weights_of

from llorch.diagnosis.mistakes import (
    GENERATION,
    IN_PRODUCTS,
    QUANTISED,
    SAMPLING,
    STAGE_MISTAKES,
    GenerationInputs,
    Mistake,
)
from llorch.diagnosis.mistakes.generation import right as right_loop
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.diagnosis.mistakes.variants import VISIBLE, Variants, variants
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.goldens.forward import ENGINES
from llorch.runtime.builtin import OTHERS
from llorch.stages.comparison import EXACT, Tolerance, measure
from llorch.stages.table import BY_NAME, keys

PURE = [name for name in MODELS if name != "Q4_K_M"]
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


@pytest.mark.parametrize("mistake", [*SHOWN, *SAMPLING, *QUANTISED], ids=by_name)
def test_mistake_goes_red_by_far_and_is_named(mistake: Mistake[Any]):
    places, n_named = [*situations(mistake)], 0
    if mistake in SHOWN:
        shown = {(p.engine, p.stage_name, p.case) for p in places if isinstance(p, Situation)}
        assert shown == {*product(ENGINES, mistake.stages, mistake.cases)}
    for where in places:
        made = where.make_variants()
        wrong = next(array for known, array in made.wrong if known is mistake)
        over = measure(wrong, where.expected, masked=where.masked).over(where.tolerance)
        assert over >= VISIBLE, f"{where}: {over:.1f} times the tolerance"
        assert named_by(where.expected, made, where.tolerance) == [], where
        if mistake not in QUANTISED or np.isfinite(wrong).all():
            names, twins = named_by(wrong, made, where.tolerance), TWINS.get(mistake.name, set())
            assert {mistake.name} <= {*names} <= {mistake.name, *twins}, f"{where}: named {names}"
            n_named += 1
    assert n_named, "nowhere does it make numbers that could be named"


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
            for engine in golden_of(model).engine_outputs:
                assert first_failing(trace, suite, case, engine, n_cached(mistake, whole)) == place, model


@pytest.mark.slow_cases(but=["micro-llama3-far", "micro-llama3-near", "micro-qwen3-near", "micro-qwen3.5-far"])
@pytest.mark.parametrize("case", ["near", "far"])
@pytest.mark.parametrize("model", MICRO + OTHERS)
def test_engine_outputs_never_match_a_known_mistake(model: str, case: str):
    golden, weights = golden_of(model), weights_of(model)
    for engine, engine_output in golden.engine_outputs.items():
        (other,) = set(ENGINES) - {engine}
        for key, stage, layer in keys(weights.config):
            alone = right(model, case, engine, 0)[key]
            made = variants(stage, layer, engine_output.traces[case], weights, golden.cases[case], alone)
            tolerance = suite_of(model).tolerances(case).isolated(key)
            assert named_by(engine_output.traces[case][key], made, tolerance) == []
            foreign = golden.engine_outputs[other].traces[case][key]  # made from slightly other inputs
            assert named_by(foreign, made, tolerance) == []


@pytest.mark.parametrize("model", MICRO)
def test_an_unknown_mistake_gets_no_name(model: str, rng: np.random.Generator):
    for stage in (stage for stage in BY_NAME.values() if stage.applies_to(weights_of(model).config)):
        where = Situation(model, "near", "llamacpp", stage.name, stage.first_layer(weights_of(model).config), 0)
        made = where.make_variants()
        noise = 1 + 1e-3 * rng.standard_normal(made.right.shape).astype(np.float32)
        assert named_by(made.right * noise, made, where.tolerance) == []


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
def test_correct_generation_loop_equals_the_text_of_the_engines(model: str):
    np.testing.assert_array_equal(texts(model).right, greedy(model))


def greedy(model: str) -> np.ndarray:
    return golden_of(model).engine_outputs["llamacpp"].greedy


@cache
def texts(model: str) -> Variants:
    loop = GenerationInputs(weights_of(model), golden_of(model).cases["near"].ids, len(greedy(model)))
    return Variants(right_loop(loop), [(mistake, mistake.result(loop, "generation")) for mistake in GENERATION])


def test_every_kind_of_mistake_in_a_product_is_known():
    assert len(QUANTISED) > 30
    assert {step for mistake in QUANTISED for step in mistake.stages} == IN_PRODUCTS.keys()
    assert {case for mistake in QUANTISED for case in mistake.cases} == {*PURE}


@pytest.mark.parametrize("kind", PURE)
def test_ggml_products_are_never_accused_and_mistakes_start_from_the_right_product(kind: str):
    for where in (QuantisedSituation(step, GGMLType[kind]) for step in IN_PRODUCTS):
        assert measure(where.make_variants().right, where.expected).within(where.tolerance), where
        assert named_by(where.expected, where.make_variants(), where.tolerance) == [], where
    inputs, expected = QuantisedSituation("product", GGMLType[kind]).inputs_and_expected()
    assert measure(inputs.product(), expected).within(Tolerance(1e-6, 4e-6))


def test_an_unknown_mistake_in_a_product_gets_no_name(rng: np.random.Generator):
    where = QuantisedSituation("product", GGMLType.Q4_K)
    right = where.make_variants().right
    noise = 1 + 1e-3 * rng.standard_normal(right.shape, np.float32)
    assert named_by(right * noise, where.make_variants(), where.tolerance) == []
