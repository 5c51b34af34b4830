"""Known mistakes of training planted into the running NumPy code, wherever the right function is used."""

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from typing import Any

import pytest

from llorch.builtin import builtin_path, goldens_folder
from llorch.files import Weights, open_weights
from llorch.verify.compare import Difference, Tolerance
from llorch.verify.mistakes.training import TrainingMistake
from llorch.verify.training.exports import Exports
from llorch.verify.training.goldens import MODELS, TrainingGolden, read
from llorch.verify.training.half import HalfTrainingJudge
from llorch.verify.training.judge import TrainingJudge, WideTrainingJudge
from llorch.verify.training.path import NumpyPath
from llorch.verify.training.stages import TRAINING_STAGES, Key
from llorch.verify.verifier import FAIL, Row


@cache
def training_golden_of(model: str) -> TrainingGolden:
    return read(goldens_folder() / model)


@cache
def weights_of(model: str) -> Weights:
    return open_weights(builtin_path(model))


@cache
def judge_of(model: str) -> TrainingJudge:
    return TrainingJudge(model, weights_of(model), training_golden_of(model))


@cache
def wide_judge_of(model: str) -> WideTrainingJudge:
    return WideTrainingJudge(model, weights_of(model), training_golden_of(model))


@cache
def half_judge_of(model: str) -> HalfTrainingJudge:
    return HalfTrainingJudge(model, weights_of(model), training_golden_of(model), "bfloat16")


def model_of(mistake: TrainingMistake) -> str:
    """The last model that can show a mistake: that one has the fewer layers."""
    return [model for model in MODELS if mistake.applies_to(weights_of(model).config)][-1]


def plant(mistake: TrainingMistake, patch: pytest.MonkeyPatch) -> None:
    """Put the wrong function wherever the right one is found under its own name."""
    owner, name = owner_of(mistake.part)
    right = getattr(owner, name)
    wrong = mistake.wrong(right)
    for place in {owner, *users(name, right)}:
        patch.setattr(place, name, wrong)


def owner_of(part: str) -> tuple[Any, str]:
    """The module or class that defines a function, and the function's name."""
    path, _, name = part.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name


def users(name: str, right: Any) -> Iterator[Any]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("llorch") and getattr(module, name, None) is right:
            yield module


@cache
def rows_with(mistake: TrainingMistake | None, model: str) -> list[Row]:
    """Rows of a model with a mistake in the code, in the order of the table, up to the checkpoints of the mistake."""
    judge, last = judge_of(model), mistake.checkpoints[-1] if mistake else "20"
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            plant(mistake, patch)
        path = NumpyPath(judge.weights, judge.golden)
        exports = Exports.of(model, judge.weights, judge.golden) if last == "20" else None
        if last == "20":
            ours = {
                "isolated": dict(path.isolated()),
                "chained": {**dict(path.merged()), **(exports.logits if exports else {})},
            }
        else:
            alone = last == "18"  # ten steps in a row show nothing more than one from the golden's state
            before = {"isolated": last, "chained": "17" if alone else last}
            ours = {mode: dict(up_to(number, getattr(path, mode)())) for mode, number in before.items()}
        later = {
            stage.name for stage in TRAINING_STAGES if stage.checkpoint > last or (stage.checkpoint < last == "20")
        }
        rows = [*judge.rows("numpy", ours, left_out=later), *(exports.rows if exports else [])]
        if last == "18":
            rows = [row for row in rows if row.mode == "isolated" or row.checkpoint < last]
    return sorted(rows, key=lambda row: (row.checkpoint, row.mode != "isolated", row.mode == "exact"))


def up_to(last: str, arrays: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Arrays of the checkpoints up to one; isolated and chained runs make them in this order."""
    return takewhile(lambda entry: Key.of(entry[0]).group.checkpoint <= last, arrays)


def first_red(rows: list[Row]) -> Row | None:
    return next((row for row in rows if row.verdict == FAIL), None)


def over_in_half(row: Row) -> float:
    """By what factor a row is over the tolerance of bfloat16; 0 where that has none."""
    judge, key = half_judge_of(row.model), Key(row.case, row.layer, row.stage)
    if row.mode == "exact" or not judge.shows(row.mode, key):
        return 0.0
    allowed = judge.stored_tolerance(row.mode, key.group).at_most(judge.ceiling_of(row.mode, key.group))
    return Difference(row.error, row.worst).over(allowed)


def over(row: Row) -> float:
    return Difference(row.error, row.worst).over(Tolerance(row.tolerance, row.tolerance_worst))
