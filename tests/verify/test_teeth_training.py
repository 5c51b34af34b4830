"""Teeth of checkpoints 15 to 20: a mistake in the running code turns its checkpoint red first, and by far."""

from contextlib import suppress
from typing import Any

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
    users,
    wide_judge_of,
)
from planted_training_torch import AS_TRAINER, PLANTED
from torch_targets import on

from llorch.verify.diagnose import VISIBLE
from llorch.verify.mistakes import MISTAKES, TRAINING, TrainingMistake
from llorch.verify.report.pages import FOLDER, page
from llorch.verify.torch_verify_training import LEFT_OUT
from llorch.verify.training.goldens import MODELS
from llorch.verify.training.path import NumpyPath
from llorch.verify.training.stages import BY_GROUP, TRAINING_STAGES
from llorch.verify.training.torch_path import TorchPath
from llorch.verify.verifier import BACKENDS, FAIL

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


SHARED = {  # code that both precisions share -> the group of stages that shows it alone
    "llorch.ops.lora.lora_delta": "lora_delta",
    "llorch.ops.lora.lora_backward": "gradient",
    "llorch.ops.cross_entropy.cross_entropy": "token_losses",
    "llorch.ops.cross_entropy.cross_entropy_backward": "gradient",
    "llorch.ops.rms_norm.rms_norm_backward": "gradient",
    "llorch.ops.rope.rope_backward": "gradient",
    "llorch.ops.swiglu.swiglu_backward": "gradient",
    "llorch.ops.attention.attention_scores_backward": "gradient",
    "llorch.train.adamw.clip_by_norm": "grad_norm",
    "llorch.train.adamw.moments": "first_moment",
    "llorch.train.adamw.moved": "parameters",
    "llorch.train.schedules.learning_rate": "learning_rate",
    "llorch.lora.merge.merged_matrix": "merged_weight",
}
SHARED_TORCH = {
    "llorch.pytorch.lora.leaves.delta": "lora_delta",
    "llorch.pytorch.lora.leaves.Delta.backward": "gradient",
    "llorch.pytorch.train.step.loss_sum": "gradient",
    "llorch.pytorch.train.step.trained_tokens": "gradient",
    "llorch.pytorch.train.adamw.AdamW.clip": "first_moment",
    "llorch.pytorch.train.adamw.AdamW.step": "parameters",
}
GIVEN_MORE = ("clip", "step")  # take one number, and are given one that is off
LEAST = 1e5  # times the limit, by one part in a million


def off(made: Any) -> Any:
    """Every number of a result off by one part in a million."""
    if isinstance(made, tuple):
        return tuple(map(off, made))
    if isinstance(made, dict):
        return {name: off(array) for name, array in made.items()}
    return made if made is None else made * (1 + 1e-6)


def wrong(name: str, right: Any) -> Any:
    if name in GIVEN_MORE:
        return lambda own, number: right(own, off(number))
    made = lambda *given, **named: off(right(*given, **named))  # noqa: E731
    return staticmethod(made) if name == "backward" else made


def worst_in_float64(path: NumpyPath | TorchPath, model: str, group: str) -> float:
    """By what factor a group of stages is over the limits of float64 at most, alone or in a chain up to gradients."""
    ours = {"isolated": dict(path.isolated()), "chained": dict(up_to("17", path.chained()))}
    rows = list(wide_judge_of(model).rows("float64", ours))
    return max(over(row) for row in rows if row.stage.split(".")[0] == group and not row.note)


@pytest.mark.parametrize(("part", "group"), SHARED.items())
def test_one_part_in_a_million_in_code_that_both_precisions_share_is_far_over_the_limit(
    part: str, group: str, monkeypatch: pytest.MonkeyPatch
):
    owner, name = owner_of(part)
    right = getattr(owner, name)
    for place in {owner, *users(name, right)}:
        monkeypatch.setattr(place, name, wrong(name, right))
    judge = wide_judge_of(MODELS[-1])
    assert worst_in_float64(NumpyPath(judge.weights, judge.golden), judge.name, group) > LEAST


@pytest.mark.parametrize("as_trainer", [False, True])
@pytest.mark.parametrize(("part", "group"), SHARED_TORCH.items())
def test_one_part_in_a_million_in_what_the_trainer_runs_is_far_over_the_limit(
    part: str, group: str, as_trainer: bool, monkeypatch: pytest.MonkeyPatch
):
    owner, name = owner_of(part)
    monkeypatch.setattr(owner, name, wrong(name, getattr(owner, name)))
    judge = wide_judge_of(MODELS[-1])
    path = TorchPath(judge.weights, judge.golden, on("torch-cpu-float64"), as_trainer=as_trainer)
    assert worst_in_float64(path, judge.name, group) > LEAST
