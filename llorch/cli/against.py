"""`llorch verify --against DUMP`: an engine that is not run, but wrote down what it computed."""

from collections.abc import Sequence
from pathlib import Path

import click

from llorch.cli.dumped import DumpPlan, plan_dump
from llorch.cli.inputs import chosen_numerics
from llorch.cli.judged import NOT_JUDGED, JudgedModel
from llorch.cli.judging import ClaimedArithmetic, refuse_residency, refuse_scheme, reported
from llorch.cli.output import progress, say
from llorch.cli.report import print_model
from llorch.cli.tables import console
from llorch.diagnosis.guards import require_read_rightly
from llorch.diagnosis.rows import dump_rows


def plan_check(
    models: Sequence[str], dump: Path, mapping: Path | None, arithmetic: ClaimedArithmetic, *, prompt: str | None,
    tokens: list[int] | None,
) -> DumpPlan:  # fmt: skip
    """Resolve what `verify --against DUMP` asks for; UsageError if the options do not go with a dump."""
    if len(models) != 1 or arithmetic.backend != "numpy":
        raise click.UsageError(
            "--against with a dump: expected one MODEL and the NumPy path; give one MODEL, without --backend"
        )
    refuse_residency(arithmetic)
    refuse_scheme(arithmetic)
    numerics = chosen_numerics(arithmetic.numerics, arithmetic.kv_cache)
    plan = plan_dump(dump, models[0], mapping=mapping, prompt=prompt, tokens=tokens, numerics=numerics)
    require_read_rightly(plan.dump)
    return plan


def judge_dump(plan: DumpPlan, *, as_json: bool, detail: bool) -> int:
    """Compare llorch's stages with the stages of a dump, report the comparisons, and return the exit code."""
    with progress(f"verifying {plan.spec}") as tell:
        rows, not_run = dump_rows(plan.weights, plan.dump, model=plan.spec, say=tell)
    checkpoints = sorted({row.checkpoint for row in rows})
    notes = plan.weights.notes_on_left_out(NOT_JUDGED)
    judged = JudgedModel(plan.spec, rows, not_run, checkpoints=checkpoints, dump=str(plan.path), notes=notes)
    if not as_json:
        for note in plan.dump.notes:
            say(f"note: {note}")
        print_model(console(), judged, detail=detail)
    return reported([judged], {}, plan.threads, strict=False, as_json=as_json)
