"""Teeth of checkpoints 15 to 20: a mistake in the running code turns its checkpoint red first, and by far."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from inject.planted_training import (
    first_red,
    judged,
    models_of,
    over,
    over_in_half,
    rows_with,
    training_golden_of,
    up_to,
    weights_of,
)
from inject.planted_training_torch import AS_TRAINER, PLANTED
from runs.kept_suites import kept
from runs.torch_targets import on

from checkpoints.generated.pages import FOLDER, page
from llorch.comparison import FAIL
from llorch.diagnosis.mistakes import MISTAKES, TRAINING, Mistake
from llorch.diagnosis.mistakes.planting import owner_of, replaced
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.numerics import DtypeName
from llorch.verify.training.claims import claims, rows
from llorch.verify.training.goldens import MODELS
from llorch.verify.training.limits import NUMPY_ALONE
from llorch.verify.training.runner import NumpyTrainingRunner
from llorch.verify.training.stages import BY_GROUP
from llorch.verify.training.torch_runner import TorchTrainingRunner

LESS_IN_HALF = frozenset({  # red in bfloat16, by less than 10 times
    "merge-without-scale", "loss-smoothing-added", "accumulation-mean-of-means", "gradient-norm-second-term-missing",
    "gradient-silu-second-term-missing", "gradient-lora-input-left-out", "gradient-graph-cut-between-blocks",
    "gradient-residual-left-out", "gradient-divided-by-rows",
})  # fmt: skip
NOT_IN_HALF = frozenset({  # of files and of learning rates, which have no dtype
    "export-b-rows-not-permuted", "export-one-alpha", "schedule-one-step-late", "schedule-one-step-early",
    "schedule-decays-from-the-start", "schedule-without-warmup",
})  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def limits_are_derived_once() -> Iterator[None]:
    with kept():
        yield


SHOWN = [mistake for mistake in TRAINING if models_of(mistake)]  # the others: `tests/families/test_teeth_training.py`


# A keyword with another number does not read this file, because it has these names.
NAMES = ("checkpoint_15", "checkpoint_16", "checkpoint_17", "checkpoint_18", "checkpoint_19", "checkpoint_20")


def by_name(mistake: Mistake[Any]) -> str:
    return "_".join((*(name for name in NAMES if name[-2:] in mistake.checkpoints), mistake.name))


@pytest.mark.plain_cases(
    "checkpoint_15_lora-not-scaled",
    "checkpoint_16_loss-labels-shifted-twice",
    "checkpoint_17_gradient-f*",
    "checkpoint_18_adamw-decay-after-update",
    "checkpoint_18_schedule-decays-from-the-start",
    "checkpoint_20_export-one-alpha",
)
@pytest.mark.parametrize("mistake", SHOWN, ids=by_name)
def test_mistake_of_training_goes_red_by_far_at_its_checkpoint_first(mistake: Mistake[Any]):
    owner, name = owner_of(mistake.part)
    assert callable(getattr(owner, name))
    assert set(mistake.stages) <= BY_GROUP.keys()
    found = rows_with(mistake, models_of(mistake)[-1])  # of the fewer layers
    red = first_red(found)
    assert red is not None, "nothing fails"
    assert red.checkpoint == mistake.checkpoints[0], red
    for stage in mistake.stages:
        factors = [over(row) for row in found if row.place.stage == stage]
        assert max(factors) >= VISIBLE, f"{stage}: {max(factors):.1f} times the tolerance"
    assert {*mistake.cases} <= {row.case for row in found if row.verdict == FAIL}
    largest = max(map(over_in_half, found))  # in bfloat16, of which page 17 tells
    if mistake.name in NOT_IN_HALF:
        assert largest < 1
    else:
        assert largest >= (1 if mistake.name in LESS_IN_HALF else VISIBLE), f"{largest:.1f} times the tolerance"


def test_page_17_names_the_mistakes_that_bfloat16_hardly_shows():
    text = page(FOLDER, "17").read_text(encoding="utf-8").split("## In bfloat16")[1].split("\n## ")[0]
    assert {mistake.name for mistake in SHOWN if f"`{mistake.name}`" in text} == LESS_IN_HALF | NOT_IN_HALF
    assert f"{len(SHOWN) - len(LESS_IN_HALF | NOT_IN_HALF)} of {len(SHOWN)}" in text


@pytest.mark.plain_cases(
    "lora-alpha-not-divided-float32",
    "lora-scaled-twice-bfloat16",
    "loss-labels-not-shifted-float32",
    "loss-smoothing-missing-bfloat16",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANTED)
def test_mistake_of_training_in_torch_goes_red_by_far_at_its_checkpoint_first(
    name: str, dtype: DtypeName, monkeypatch: pytest.MonkeyPatch
):
    mistake, model, last = MISTAKES[name], MODELS[-1], MISTAKES[name].checkpoints[0]
    PLANTED[name](monkeypatch)
    golden, target = training_golden_of(model), on(f"torch-cpu-{dtype}")
    runner = TorchTrainingRunner(weights_of(model), golden, target, as_trainer=name in AS_TRAINER)
    rows = judged(model, golden, runner, last, dtype=dtype, left_out=NUMPY_ALONE)
    red = first_red(rows)
    assert red is not None, "nothing fails"
    assert red.checkpoint == last, red
    least = 1 if dtype == "bfloat16" and name in LESS_IN_HALF else VISIBLE
    assert max(over(row) for row in rows if row.place.stage == mistake.stages[0]) >= least


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
    "llorch.pytorch.lora.leaves.DeltaFunction.backward": "gradient",
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


def worst_in_float64(runner: NumpyTrainingRunner | TorchTrainingRunner, group: str) -> float:
    """By what factor a group of stages is over the limits of float64 at most, alone or in a chain up to gradients."""
    model, last = MODELS[-1], BY_GROUP[group].checkpoint
    ours = {"isolated": dict(up_to(last, runner.isolated())), "chained": {}}
    if last <= "17":
        ours["chained"] = dict(up_to(last, runner.chained()))
    claimed = claims(training_golden_of(model), weights_of(model).config, "float64")
    found = rows(model, (claim for claim in claimed if claim.place.stage == group), ours, "float64")
    return max(over(row) for row in found if not row.note)


@pytest.mark.slow_cases(
    "llorch.ops.attention.att*",
    "llorch.ops.cross_entropy.cross_entropy_*",
    "llorch.ops.lora.lora_backward-gradient",
    "llorch.ops.rms_norm.rms_*",
    "llorch.ops.rope.rope_backward-gradient",
    "llorch.ops.swiglu.swiglu_backward-gradient",
)
@pytest.mark.parametrize(("part", "group"), SHARED.items())
def test_one_part_in_a_million_in_code_that_both_precisions_share_is_far_over_the_limit(part: str, group: str):
    weights = weights_of(MODELS[-1]).astype(np.float64)
    with replaced(part, lambda right: wrong(part.rpartition(".")[2], right)):
        assert worst_in_float64(NumpyTrainingRunner(weights, training_golden_of(MODELS[-1])), group) > LEAST


@pytest.mark.plain_cases(
    "llorch.pytorch.lora.leaves.delta-lora_delta-F*", "llorch.pytorch.train.adamw.AdamW.step-parameters-T*"
)
@pytest.mark.parametrize("as_trainer", [False, True])
@pytest.mark.parametrize(("part", "group"), SHARED_TORCH.items())
def test_one_part_in_a_million_in_what_the_trainer_runs_is_far_over_the_limit(
    part: str, group: str, as_trainer: bool, monkeypatch: pytest.MonkeyPatch
):
    owner, name = owner_of(part)
    monkeypatch.setattr(owner, name, wrong(name, getattr(owner, name)))
    model, target = MODELS[-1], on("torch-cpu-float64")
    runner = TorchTrainingRunner(weights_of(model), training_golden_of(model), target, as_trainer=as_trainer)
    assert worst_in_float64(runner, group) > LEAST
