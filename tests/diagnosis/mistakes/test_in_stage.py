"""Functions of lessons inside their stages: the right function makes the right array, wherever a mistake has a part."""

from collections.abc import Mapping

import numpy as np
import pytest
from faults.situations import n_cached
from helpers.stored_goldens import golden_of, suite_of, weights_of

from llorch.apps.learn.lessons import PARTS
from llorch.diagnosis.mistakes import MISTAKES, STAGE_MISTAKES, Mistake
from llorch.diagnosis.mistakes.in_stage import IN_STAGE
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, part_of_trace, stage_inputs
from llorch.stages.comparison import measure
from llorch.stages.table import BY_NAME, key

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
