"""`llorch verify --against DUMP`: an engine that is not run, but wrote down what it computed."""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from llorch.cli.dumped import read_stages
from llorch.cli.inputs import chosen_numerics, model_path
from llorch.cli.judged import JudgedModel
from llorch.cli.judging import ClaimedArithmetic, refuse_residency, refuse_scheme, reported
from llorch.cli.options import use_threads
from llorch.cli.output import progress, say
from llorch.cli.report import print_model
from llorch.cli.tables import console
from llorch.diagnosis.rows import dump_rows
from llorch.files import open_weights
from llorch.model import Model
from llorch.numerics import EXACT


def judge_dump(
    models: Sequence[str], dump: Path, mapping: Path | None, arithmetic: ClaimedArithmetic, *, prompt: str | None,
    tokens: list[int] | None, as_json: bool, detail: bool,
) -> int:  # fmt: skip
    """Judge our stages of one model by what another engine wrote down of a run, report, and return the exit code."""
    if len(models) != 1 or arithmetic.backend != "numpy":
        raise click.UsageError(
            "--against with a dump: expected one MODEL and the NumPy path; give one MODEL, without --backend"
        )
    refuse_residency(arithmetic)
    refuse_scheme(arithmetic)
    weights = open_weights(model_path(models[0]))
    threads, numerics = use_threads(weights.config), chosen_numerics(arithmetic.numerics, arithmetic.kv_cache)
    ids = Model(weights).prompt_ids(prompt) if prompt is not None else tokens
    with progress(f"verifying {models[0]}") as tell:
        stages = read_stages(dump, weights, mapping, ids, None)
        run = weights.using(numerics) if numerics != EXACT else weights.astype(np.float64)
        rows, not_run = dump_rows(run, stages, model=models[0], say=tell)
    judged = JudgedModel(models[0], rows, not_run, checkpoints=sorted({row.checkpoint for row in rows}), dump=str(dump))
    if not as_json:
        for note in stages.notes:
            say(f"note: {note}")
        print_model(console(), judged, detail=detail)
    return reported([judged], {}, threads, strict=False, as_json=as_json)
