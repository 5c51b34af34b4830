"""Teeth of checkpoint 14: a mistake planted into the torch path turns the right row red first, and by far."""

from functools import cache

import numpy as np
import pytest
from inject.planted import golden_of, weights_of
from inject.planted_torch import PLANTED, Planted
from runs.torch_targets import on

from llorch.comparison import FAIL, Difference, Tolerance
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.files import Weights
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel
from llorch.verify.expectations.forward import ForwardSuite
from llorch.verify.judge import Comparison
from llorch.verify.runners.torch import VARIANTS, TorchRunner, TorchVariant


@cache
def suite(model: str, case: str) -> ForwardSuite:
    golden = golden_of(model)
    return ForwardSuite(model, weights_of(model), {case: golden.cases[case]}, golden.evidence, golden.truth)


def broken(planted: Planted, target: str, patch: pytest.MonkeyPatch) -> list[Comparison]:
    """The rows of a model with a mistake in it, in the order of the forward pass."""
    base = VARIANTS[planted.base]

    def make(weights: Weights, at: Target) -> TorchModel:
        model = base.make(weights, at)
        planted.plant(model.module, patch)
        return model

    variant = TorchVariant(make, hidden=base.hidden, in_batch=base.in_batch)
    runner = TorchRunner(weights_of(planted.model), on(target), variant, f"{target}-broken")
    rows = getattr(suite(planted.model, planted.case), planted.rows)(runner)
    return [row for row in rows if row.mode != "isolated" or row.checkpoint == "11"]


def first_red(rows: list[Comparison]) -> Comparison:
    return next(row for row in rows if row.verdict == FAIL)


def place(row: Comparison) -> tuple[str, str, int | None]:
    return row.checkpoint, row.stage, row.layer


def over(row: Comparison) -> float:
    tolerance = Tolerance(row.tolerance, row.tolerance_worst, row.tolerance_token)
    return Difference(row.error, row.worst, row.note or None, tokens=np.array([row.token_error])).over(tolerance)


def by_name(name: str) -> str:
    return f"checkpoint_14_{PLANTED[name].shows[0]}_{name.replace(' ', '-')}"


@pytest.mark.parametrize("name", PLANTED, ids=by_name)
def test_mistake_in_torch_goes_red_by_far_at_its_checkpoint_first(name: str, monkeypatch: pytest.MonkeyPatch):
    planted = PLANTED[name]
    rows = broken(planted, "torch-cpu-float32", monkeypatch)
    red = first_red(rows)
    assert place(red) == planted.shows
    alike = [row for row in rows if place(row) == planted.shows and (row.case, row.mode) == (red.case, red.mode)]
    assert {row.producer for row in alike} == {"llamacpp", "transformers"}
    assert all(over(row) >= VISIBLE for row in alike), [over(row) for row in alike]


@pytest.mark.plain_cases(
    "checkpoint_14_01b_positi*",
    "checkpoint_14_01b_rope-of-keys-missing",
    "checkpoint_14_04_mask-of*",
    "checkpoint_14_08_tied-head-not-tied",
)
@pytest.mark.parametrize("name", [name for name in PLANTED if not PLANTED[name].of_rounding], ids=by_name)
def test_mistake_in_torch_goes_red_at_its_checkpoint_in_bfloat16_too(name: str, monkeypatch: pytest.MonkeyPatch):
    planted = PLANTED[name]
    assert place(first_red(broken(planted, "torch-cpu-bfloat16", monkeypatch))) == planted.shows


@pytest.mark.parametrize("base", sorted({planted.base for planted in PLANTED.values()}))
@pytest.mark.parametrize("rows", sorted({planted.rows for planted in PLANTED.values()}))
def test_what_is_planted_into_has_no_red_row_of_its_own(base: str, rows: str, monkeypatch: pytest.MonkeyPatch):
    sound = Planted(lambda module, patch: None, ("", "", None), base=base, rows=rows)
    assert all(row.verdict != FAIL for row in broken(sound, "torch-cpu-float32", monkeypatch))
