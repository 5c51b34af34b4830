"""The library of mistakes as data: names, stages, sentences; and the diagnosis that reads it."""

import re

import numpy as np
import pytest
from planted import golden_of, suite_of, weights_of

from llorch.stages import BY_NAME, CHECKPOINTS, keys
from llorch.verify.compare import Tolerance
from llorch.verify.diagnose import Variants, diagnose, made_wrong, mistakes_of, rank
from llorch.verify.mistakes import (
    AFTER_LOGITS,
    GENERATION,
    IN_PRODUCTS,
    MISTAKES,
    QUANTISED,
    SAMPLING,
    STAGE_MISTAKES,
    TRAINING,
    Mistake,
    checkpoint_of,
    of_checkpoint,
)
from llorch.verify.mistakes.norm import skipped
from llorch.verify.mistakes.stage_inputs import StageInputs, stage_inputs
from llorch.verify.training.stages import BY_GROUP

EVERY = (*STAGE_MISTAKES, *SAMPLING, *GENERATION, *QUANTISED, *TRAINING)
TOLERANCE = Tolerance(1e-6, 1e-6)


def named_mistake(name: str) -> Mistake[StageInputs]:
    return Mistake(name=name, stages=("attn_norm",), diagnosis="Made up.", wrong=skipped)


def test_the_library_holds_more_than_a_hundred_mistakes_under_different_names():
    assert len(MISTAKES) == len(EVERY) > 100


def test_the_library_is_filed_by_the_kind_of_step():
    assert all(set(mistake.stages) <= BY_NAME.keys() for mistake in STAGE_MISTAKES)
    assert all(set(mistake.stages) <= AFTER_LOGITS.keys() for mistake in (*SAMPLING, *GENERATION))
    assert all(set(mistake.stages) <= IN_PRODUCTS.keys() for mistake in QUANTISED)
    assert all(set(mistake.stages) <= BY_GROUP.keys() for mistake in TRAINING)


def test_mistakes_are_well_formed_and_their_sentences_differ():
    for mistake in EVERY:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", mistake.name)
        assert re.fullmatch(r"[^\n]{15,}\.", mistake.diagnosis), mistake
        assert len(set(mistake.stages)) == len(mistake.stages) > 0, mistake
        assert mistake.cases, mistake
        assert mistake.checkpoints == tuple(dict.fromkeys(checkpoint_of(stage) for stage in mistake.stages)), mistake
    assert len({mistake.diagnosis for mistake in EVERY}) == len(EVERY)


def test_what_a_mistake_reads_is_made_before_its_stage():
    order = ["block_in", *BY_NAME, "last_block_out"]
    order.remove("final_norm")  # comes after last_block_out
    order.append("final_norm")
    for mistake in STAGE_MISTAKES:
        for stage in (stage for stage in mistake.stages if stage != "logits"):
            assert all(order.index(name) < order.index(stage) for name in mistake.reads), mistake.name


@pytest.mark.parametrize("number", [number for number in CHECKPOINTS if number != "14"])  # it reruns 01 to 12
def test_every_checkpoint_has_mistakes_that_it_catches(number: str):
    names = of_checkpoint(number)
    assert names
    assert all(number in MISTAKES[name].checkpoints for name in names)


def test_every_stage_has_a_mistake():
    assert {stage for mistake in STAGE_MISTAKES for stage in mistake.stages} == set(BY_NAME)


def test_a_mistake_of_a_second_pass_is_no_suspect_in_a_first():
    config = weights_of("micro-llama").config
    first = {mistake.name for mistake in mistakes_of("q_rope", config, n_cached=0)}
    second = {mistake.name for mistake in mistakes_of("q_rope", config, n_cached=4)}
    assert second - first == {"rope-position-restarts", "rope-position-counts-steps"}


def test_diagnose_names_the_mistake_in_every_layer():
    weights, golden = weights_of("micro-qwen3"), golden_of("micro-qwen3")
    stage, whole = BY_NAME["q_norm"], golden.cases["near"]
    (mistake,) = (mistake for mistake in STAGE_MISTAKES if mistake.name == "norm-of-heads-together")
    trace = golden.evidence["transformers"].traces["near"]
    for name, _, layer in (row for row in keys(weights.config) if row[1] is stage):
        tolerance = suite_of("micro-qwen3").limits("near").isolated(name)
        observed = made_wrong(mistake, stage_inputs(stage, layer, weights, whole, trace), "q_norm")
        suspects = diagnose(stage, layer, trace, weights, whole, observed, tolerance=tolerance)
        assert suspects[0].mistake is mistake
        assert [suspect.named for suspect in suspects[:2]] == [True, False]


def test_suspects_are_ranked_by_distance_and_none_is_named_without_agreement():
    right = np.ones((2, 3), np.float32)
    made = Variants(right, [(named_mistake("is-far"), right * 3), (named_mistake("is-near"), right * 2)])
    suspects = rank(np.full((2, 3), 2.1, np.float32), made, tolerance=TOLERANCE)
    assert [(s.mistake.name, s.named) for s in suspects] == [("is-near", False), ("is-far", False)]


def test_the_nearer_of_two_that_agree_comes_first():
    right = np.ones(4, np.float32)
    made = Variants(right, [(named_mistake("agrees-roughly"), right * 2 + 1e-6), (named_mistake("agrees"), right * 2)])
    suspects = rank(right * 2, made, tolerance=TOLERANCE)
    assert [(s.mistake.name, s.named) for s in suspects] == [("agrees", True), ("agrees-roughly", True)]


def test_a_mistake_that_these_inputs_cannot_show_is_no_suspect():
    right = np.ones(4, np.float32)
    made = Variants(right, [(named_mistake("is-invisible"), right * np.float32(1 + 2e-6))])
    assert rank(right * np.float32(1 + 4e-6), made, tolerance=TOLERANCE) == []


def test_a_mistake_of_another_shape_is_a_suspect_only_for_its_shape():
    right = np.ones(4, np.float32)
    longer = np.ones(6, np.float32)
    made = Variants(right, [(named_mistake("is-longer"), longer)])
    assert [s.named for s in rank(longer, made, tolerance=TOLERANCE)] == [True]
    assert [s.named for s in rank(right * 2, made, tolerance=TOLERANCE)] == [False]


def test_an_array_with_nan_is_neither_right_nor_named():
    right = np.ones(4, np.float32)
    broken = np.full(4, np.nan, np.float32)
    suspects = rank(broken, Variants(right, [(named_mistake("makes-nan"), broken)]), tolerance=TOLERANCE)
    assert [s.named for s in suspects] == [False]


@pytest.mark.parametrize(("effect", "named"), [(0.0, False), (9.0, False), (11.0, True)])
def test_a_mistake_that_these_inputs_hardly_show_is_not_accused(effect: float, named: bool):
    right = np.ones(4)
    mistake = named_mistake("made-up")
    wrong = right * (1 + effect * TOLERANCE.error)
    observed = right * (1 + max(effect, 9.5) * TOLERANCE.error)
    suspects = rank(observed, Variants(right, [(mistake, wrong)]), tolerance=TOLERANCE)
    assert [(suspect.mistake, suspect.named) for suspect in suspects] == ([(mistake, True)] if named else [])
