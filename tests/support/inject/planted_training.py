"""Known mistakes of training planted into the running NumPy code, wherever the right function is used."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from typing import Any

from llorch.builtin import builtin_path, goldens_folder
from llorch.comparison import FAIL, Difference, Tolerance
from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.planting import planted
from llorch.files import Weights, open_weights
from llorch.numerics import DtypeName
from llorch.verify.judge import Comparison
from llorch.verify.training.claims import claims, limit, rows
from llorch.verify.training.exports import exported, file_row
from llorch.verify.training.goldens import MODELS, TrainingGolden, read
from llorch.verify.training.limits import shows
from llorch.verify.training.places import Arrays
from llorch.verify.training.runner import NumpyTrainingRunner, Results
from llorch.verify.training.torch_runner import TorchTrainingRunner


@cache
def training_golden_of(model: str) -> TrainingGolden:
    return read(goldens_folder() / model)


@cache
def weights_of(model: str) -> Weights:
    return open_weights(builtin_path(model))


def models_of(mistake: Mistake[Any]) -> list[str]:
    """Models with training goldens that can have a mistake; none of experts and delta nets, which no dense one has."""
    return [model for model in MODELS if mistake.applies_to(weights_of(model).config)]


@cache
def rows_with(mistake: Mistake[Any] | None, model: str) -> list[Comparison]:
    """Rows of a model with a mistake in the code, checkpoint by checkpoint, up to the last of the mistake."""
    weights, golden, last = weights_of(model), training_golden_of(model), mistake.checkpoints[-1] if mistake else "20"
    with planted(*([] if mistake is None else [mistake])):
        runner = NumpyTrainingRunner(weights, golden)
        if last < "20":
            return judged(model, golden, runner, last)
        logits, files = exported(weights, golden)
        ours = {"isolated": dict(runner.isolated()), "chained": dict(runner.merged()) | logits}
        of_files = [file_row(model, kind, table, golden.files[kind]) for kind, table in files.items()]
        claimed = [claim for claim in claims(golden, weights.config, "float32") if claim.place.checkpoint == last]
        return in_order([*rows(model, iter(claimed), ours, "numpy"), *of_files])


def judged(
    model: str,
    golden: TrainingGolden,
    runner: NumpyTrainingRunner | TorchTrainingRunner,
    last: str,
    *,
    dtype: DtypeName = "float32",
    left_out: Sequence[str] = (),
) -> list[Comparison]:
    """Rows of a runner up to a checkpoint; ten steps in a row show nothing more than one from the golden's state."""
    before = {"isolated": last, "chained": "17" if last == "18" else last}
    ours: dict[str, Arrays] = {mode: {} for mode in before}
    with suppress(ValueError):  # torch's optimizer refuses parameters without a gradient, and takes no step
        for mode, number in before.items():
            for place, array in up_to(number, getattr(runner, mode)()):
                ours[mode][place] = array
    every = claims(golden, weights_of(model).config, dtype)
    mine = (claim for claim in every if claim.place.checkpoint <= before[claim.mode])
    return in_order(rows(model, mine, ours, "planted", left_out=left_out))


def in_order(rows: Iterable[Comparison]) -> list[Comparison]:
    return sorted(rows, key=lambda row: (row.checkpoint, row.mode != "isolated", row.mode == "exact"))


def up_to(last: str, arrays: Results) -> Results:
    """Arrays of the checkpoints up to one; isolated and chained runs make them in this order."""
    return takewhile(lambda entry: entry[0].checkpoint <= last, arrays)


def first_red(rows: list[Comparison]) -> Comparison | None:
    return next((row for row in rows if row.verdict == FAIL), None)


def over_in_half(row: Comparison) -> float:
    """By what factor a row is over the tolerance of bfloat16; 0 where that has none."""
    if row.mode == "exact" or not shows(row.place, row.mode, "bfloat16"):
        return 0.0
    config = weights_of(row.model).config
    allowed = limit(training_golden_of(row.model), config, row.place, row.mode, "bfloat16")
    return Difference(row.error, row.worst).over(allowed)


def over(row: Comparison) -> float:
    return Difference(row.error, row.worst).over(Tolerance(row.tolerance, row.tolerance_worst))
