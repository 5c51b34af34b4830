"""The library of mistakes as data: names, stages, sentences; and the diagnosis that reads it."""

import re

import pytest
from helpers.stored_goldens import weights_of

from llorch.diagnosis.mistakes import (
    AFTER_LOGITS,
    GENERATION,
    IN_PRODUCTS,
    MISTAKES,
    QUANTISED,
    QUANTISED_FOLDERS,
    SAMPLING,
    STAGE_MISTAKES,
    TRAINING,
    checkpoint_of,
    of_checkpoint,
)
from llorch.diagnosis.mistakes.variants import mistakes_of
from llorch.stages.table import BY_NAME, CHECKPOINTS
from llorch.stages.training import BY_GROUP

EVERY = (*STAGE_MISTAKES, *SAMPLING, *GENERATION, *QUANTISED, *QUANTISED_FOLDERS, *TRAINING)


def test_the_library_holds_more_than_a_hundred_mistakes_under_different_names():
    assert len(MISTAKES) == len(EVERY) > 100


def test_the_library_is_filed_by_the_kind_of_step():
    assert all(set(mistake.stages) <= BY_NAME.keys() for mistake in STAGE_MISTAKES)
    assert all(set(mistake.stages) <= AFTER_LOGITS.keys() for mistake in (*SAMPLING, *GENERATION))
    assert all(set(mistake.stages) <= IN_PRODUCTS.keys() for mistake in (*QUANTISED, *QUANTISED_FOLDERS))
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
            reads = [name for each in mistake.reads for name in each.split("|")]
            assert all(order.index(name) < order.index(stage) for name in reads), mistake.name


@pytest.mark.parametrize("number", [number for number in CHECKPOINTS if number != "14"])  # it reruns 01 to 12
def test_every_checkpoint_has_mistakes_that_it_catches(number: str):
    names = of_checkpoint(number)
    assert names
    assert all(number in MISTAKES[name].checkpoints for name in names)


def test_every_stage_has_a_mistake():
    assert {stage for mistake in STAGE_MISTAKES for stage in mistake.stages} == set(BY_NAME)


def test_a_mistake_of_a_second_pass_is_no_suspect_in_a_first():
    config = weights_of("micro-llama").config
    first = {mistake.name for mistake in mistakes_of("q_rope", config, 0, n_cached=0)}
    second = {mistake.name for mistake in mistakes_of("q_rope", config, 0, n_cached=4)}
    assert second - first == {"rope-position-restarts", "rope-position-counts-steps"}


@pytest.mark.parametrize("model", ["micro-llama", "micro-mistral", "micro-smollm3", "micro-ministral3"])
def test_rows_in_the_order_of_the_file_are_a_suspect_where_files_have_pairs(model: str):
    suspects = {mistake.name for mistake in mistakes_of("k_proj", weights_of(model).config, 0, n_cached=0)}
    assert "qk-rows-left-interleaved" in suspects
    assert "qk-rows-reordered-needlessly" not in suspects
