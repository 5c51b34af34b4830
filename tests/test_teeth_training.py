"""Teeth of checkpoints 15 to 20: a mistake in the running code turns its checkpoint red first, and by far."""

from contextlib import suppress

import numpy as np
import pytest
from planted_training import (
    first_red,
    half_judge_of,
    judge_of,
    model_of,
    over,
    over_in_half,
    owner_of,
    rows_with,
    up_to,
)
from planted_training_torch import AS_TRAINER, PLANTED
from torch_targets import on

from llorch.diagnose import VISIBLE
from llorch.mistakes import MISTAKES, TRAINING, TrainingMistake
from llorch.report.pages import FOLDER, page
from llorch.torch_backend.training_path import TorchPath
from llorch.torch_backend.verify_training import LEFT_OUT
from llorch.training_goldens import MODELS
from llorch.training_stages import BY_GROUP, TRAINING_STAGES
from llorch.verifier import BACKENDS, FAIL

LESS_IN_HALF = frozenset({  # red in bfloat16, by less than 10 times
    "merge-without-scale", "loss-smoothing-added", "accumulation-mean-of-means", "gradient-norm-second-term-missing",
    "gradient-silu-second-term-missing", "gradient-lora-input-left-out", "gradient-graph-cut-between-blocks",
    "gradient-residual-left-out", "gradient-divided-by-rows",
})  # fmt: skip
NOT_IN_HALF = frozenset({  # of files and of learning rates, which have no dtype
    "export-b-rows-not-permuted", "export-one-alpha", "schedule-one-step-late", "schedule-one-step-early",
    "schedule-decays-from-the-start", "schedule-without-warmup",
})  # fmt: skip


def by_name(mistake: TrainingMistake) -> str:
    return "_".join((*(f"checkpoint_{number}" for number in mistake.checkpoints), mistake.name))


@pytest.mark.parametrize("mistake", TRAINING, ids=by_name)
def test_mistake_of_training_goes_red_by_far_at_its_checkpoint_first(mistake: TrainingMistake):
    rows = rows_with(mistake, model_of(mistake))
    red = first_red(rows)
    assert red is not None, "nothing fails"
    assert red.checkpoint == mistake.checkpoints[0], red
    for stage in mistake.stages:
        factors = [over(row) for row in rows if row.stage.split(".")[0] == stage]
        assert max(factors) >= VISIBLE, f"{stage}: {max(factors):.1f} times the tolerance"


@pytest.mark.parametrize("mistake", TRAINING, ids=by_name)
def test_mistake_of_training_is_red_in_each_of_its_cases(mistake: TrainingMistake):
    rows = rows_with(mistake, model_of(mistake))
    assert {*mistake.cases} <= {row.case for row in rows if row.verdict == FAIL}


@pytest.mark.parametrize("model", MODELS)
def test_what_training_mistakes_are_planted_into_has_no_red_row_of_its_own(model: str):
    assert first_red(list(judge_of(model).numpy_rows("numpy", BACKENDS["numpy"]))) is None


@pytest.mark.parametrize("mistake", TRAINING, ids=by_name)
def test_part_of_a_training_mistake_is_a_function_of_ours(mistake: TrainingMistake):
    owner, name = owner_of(mistake.part)
    assert callable(getattr(owner, name))
    assert set(mistake.stages) <= BY_GROUP.keys()


@pytest.mark.parametrize("mistake", TRAINING, ids=by_name)
def test_mistake_of_training_is_as_visible_in_bfloat16_as_its_page_says(mistake: TrainingMistake):
    largest = max(over_in_half(row) for row in rows_with(mistake, model_of(mistake)))
    if mistake.name in NOT_IN_HALF:
        assert largest < 1
    else:
        assert largest >= (1 if mistake.name in LESS_IN_HALF else VISIBLE), f"{largest:.1f} times the tolerance"


def test_page_17_names_the_mistakes_that_bfloat16_hardly_shows():
    text = page(FOLDER, "17").read_text(encoding="utf-8").split("## In bfloat16")[1].split("\n## ")[0]
    assert {mistake.name for mistake in TRAINING if f"`{mistake.name}`" in text} == LESS_IN_HALF | NOT_IN_HALF
    assert f"{len(TRAINING) - len(LESS_IN_HALF | NOT_IN_HALF)} of {len(TRAINING)}" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANTED)
def test_mistake_of_training_in_torch_goes_red_by_far_at_its_checkpoint_first(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    half = dtype == "bfloat16"
    mistake, judge = MISTAKES[name], (half_judge_of if half else judge_of)(MODELS[-1])
    PLANTED[name](monkeypatch)
    path = TorchPath(judge.weights, judge.golden, on(f"torch-cpu-{dtype}"), as_trainer=name in AS_TRAINER)
    last = mistake.checkpoints[0]
    before = {"isolated": last, "chained": "17" if last == "18" else last}
    ours: dict[str, dict[str, np.ndarray]] = {"isolated": {}, "chained": {}}
    with suppress(ValueError):  # the optimizer refuses parameters without a gradient, and takes no step
        for mode, number in before.items():
            for key, array in up_to(number, getattr(path, mode)()):
                ours[mode][key] = array
    later = {stage.name for stage in TRAINING_STAGES if stage.checkpoint > last}
    rows = [
        row
        for row in judge.rows("torch", ours, left_out={*LEFT_OUT, *later})
        if row.mode == "isolated" or row.checkpoint < "18"
    ]
    red = first_red(sorted(rows, key=lambda row: row.checkpoint))
    assert red is not None, "nothing fails"
    assert red.checkpoint == last, red
    least = 1 if half and name in LESS_IN_HALF else VISIBLE
    assert max(over(row) for row in rows if row.stage.split(".")[0] == mistake.stages[0]) >= least
