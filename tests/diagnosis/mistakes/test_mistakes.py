"""The library of mistakes as data: names, stages, sentences; and the diagnosis that reads it.

Functions of lessons inside their stages: the right function makes the right array, wherever a mistake has a part.
Wrong functions in the place of right ones: wherever these are used, and never for longer than they are wanted.
"""

import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from faults.situations import n_cached
from helpers.stored_goldens import golden_of, suite_of, weights_of

from llorch.apps.learn.lessons import PARTS
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
    Mistake,
    checkpoint_of,
    of_checkpoint,
)
from llorch.diagnosis.mistakes.in_stage import IN_STAGE
from llorch.diagnosis.mistakes.mistake import injected
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, part_of_trace, stage_inputs
from llorch.diagnosis.mistakes.variants import list_mistakes
from llorch.judging.runners import training_numpy as runner
from llorch.lora.config import LoraConfig
from llorch.stages.comparison import measure
from llorch.stages.table import BY_NAME, CHECKPOINTS, key
from llorch.stages.training import BY_GROUP
from llorch.training import adamw

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
    first = {mistake.name for mistake in list_mistakes("q_rope", config, 0, n_cached=0)}
    second = {mistake.name for mistake in list_mistakes("q_rope", config, 0, n_cached=4)}
    assert second - first == {"rope-position-restarts", "rope-position-counts-steps"}


@pytest.mark.parametrize("model", ["micro-llama", "micro-mistral", "micro-smollm3", "micro-ministral3"])
def test_rows_in_the_order_of_the_file_are_a_suspect_where_files_have_pairs(model: str):
    suspects = {mistake.name for mistake in list_mistakes("k_proj", weights_of(model).config, 0, n_cached=0)}
    assert "qk-rows-left-interleaved" in suspects
    assert "qk-rows-reordered-needlessly" not in suspects


MODELS = ("micro-qwen3", "micro-qwen3-next")  # dense; with experts and a delta net


def rows() -> Mapping[tuple[str, str], Mistake[StageInputs]]:
    """One row of the library for each function and stage."""
    return {(mistake.part, stage): mistake for mistake in STAGE_MISTAKES if mistake.part for stage in mistake.stages}


def test_a_part_is_a_function_of_a_lesson_or_of_llorch():
    named = {mistake.part for mistake in MISTAKES.values() if mistake.part}
    assert {part for part in named if not part.startswith("llorch.")} == IN_STAGE.keys() <= PARTS.keys()


@pytest.mark.parametrize(("part", "stage"), rows(), ids=["-".join(each) for each in rows()])
def test_the_right_function_in_its_stage_makes_the_right_array(part: str, stage: str):
    model = next(name for name in MODELS if BY_NAME[stage].applies_to(weights_of(name).config))
    weights, golden, row = weights_of(model), golden_of(model), rows()[part, stage]
    whole, trace = golden.cases["near"], next(iter(golden.engine_outputs.values())).traces["near"]
    layer, n = BY_NAME[stage].first_layer(weights.config), n_cached(row, whole)
    now = part_of_trace(trace, weights.config, n, len(whole.ids))
    past = part_of_trace(trace, weights.config, 0, n) if n else None
    inputs = stage_inputs(BY_NAME[stage], layer, weights, whole.after(n), now, past, reads=row.reads)
    made = np.asarray(IN_STAGE[part](lambda right: right, inputs, stage))
    name = key(stage, layer)
    found = measure(made.astype(now[name].dtype).reshape(now[name].shape), now[name], masked=BY_NAME[stage].masked)
    assert found.within(suite_of(model).tolerances("near").isolated(name)), found


MISSING, LATE = "adamw-decay-missing", "adamw-step-counted-late"


def of(*names: str) -> list[Mistake[Any]]:
    return [MISTAKES[name] for name in names]


def test_users_of_a_function_have_the_wrong_one_too():
    with injected(*of("gradient-graph-cut-between-blocks", "loss-labels-not-shifted")):
        assert runner.shifted.__qualname__.startswith("not_shifted")


def test_injected_mistakes_stack_and_are_undone_after_an_error():
    right, of_class = adamw.moved, vars(LoraConfig)["scaling_of"]
    with pytest.raises(RuntimeError, match="inside"), injected(*of(MISSING, LATE, "lora-alpha-not-divided")):  # noqa: PT012
        assert adamw.moved is not right
        assert vars(LoraConfig)["scaling_of"] is not of_class
        raise RuntimeError("inside")
    assert adamw.moved is right
    assert vars(LoraConfig)["scaling_of"] is of_class


@pytest.mark.parametrize("n_imports", [1, 2])
def test_user_imported_after_another_mistake_has_the_wrong_one_too(monkeypatch: pytest.MonkeyPatch, n_imports: int):
    users = [ModuleType("llorch.of_this_test") for _ in range(n_imports)]
    for user in users:  # the second is the same module, imported again
        vars(user)["moved"] = adamw.moved
        with injected(*of("loss-labels-not-shifted")):
            pass
        monkeypatch.delitem(sys.modules, user.__name__, raising=False)
        monkeypatch.setitem(sys.modules, user.__name__, user)
    with injected(*of(MISSING)):
        assert vars(users[-1])["moved"] is adamw.moved
    assert vars(users[-1])["moved"] is adamw.moved
