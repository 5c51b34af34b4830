"""`llorch verify --against DUMP`: compare llorch with an engine that is not run, by the dump of its tensors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from llorch.cli.dump_input import DumpPlan, plan_dump
from llorch.cli.inputs import chosen_numerics
from llorch.cli.model_options import ModelOptions
from llorch.cli.output import progress, say
from llorch.cli.report import print_model
from llorch.cli.tables import console
from llorch.cli.verify_plan import LiveInput, end_report, refuse_residency, refuse_scheme
from llorch.cli.verify_summary import NOT_COMPARED, ModelReport
from llorch.diagnosis.diagnose import check_stages
from llorch.diagnosis.guards import require_read_rightly
from llorch.diagnosis.verdict import EARLIER_PASSES
from llorch.stages.comparison import FAIL, PASS, ROUNDING


def plan_check(
    models: Sequence[str], dump: Path, mapping: Path | None, options: ModelOptions, inputs: LiveInput
) -> DumpPlan:
    """Resolve the plan of `verify --against DUMP`; UsageError if the options do not go with a dump."""
    if len(models) != 1 or options.backend != "numpy" or options.kernels != "auto":
        raise click.UsageError(
            "--against with a dump: expected one MODEL and the NumPy path; give one MODEL, without --backend, --kernels"
        )
    refuse_residency(options)
    refuse_scheme(options)
    numerics = chosen_numerics(options.numerics, options.kv_cache)
    plan = plan_dump(dump, models[0], mapping=mapping, prompt=inputs.prompt, tokens=inputs.tokens, numerics=numerics)
    require_read_rightly(plan.dump)
    return plan


def judge_dump(plan: DumpPlan, *, as_json: bool, detail: bool) -> int:
    """Compare llorch's stages with the stages of a dump, report the comparisons, and return the exit code."""
    with progress(f"verifying {plan.spec}") as report_step:
        checker, checks = check_stages(plan.weights, plan.dump, report_step, plan.spec)
    comparisons = [c for check in checks for c in (check.isolated, check.chained) if c is not None]
    # A difference that the declared arithmetic explains is within the tolerance, so it passes here.
    comparisons = [replace(c, verdict=PASS) if c.verdict == ROUNDING else c for c in comparisons]
    defects = {(defect.n_pass, defect.key): defect.sentence for defect in plan.dump.defects}
    comparisons = [
        replace(c, verdict=FAIL, note=defects[where])
        if (where := (c.stage_ref.n_pass, c.stage_ref.key)) in defects
        else c
        for c in comparisons
    ]
    by_reason = {EARLIER_PASSES: checker.not_run, **plan.dump.left_out}
    names = {reason: ", ".join(dict.fromkeys(key for _, key in refs)) for reason, refs in by_reason.items()}
    not_run = [f"{stages}: {reason}" for reason, stages in names.items() if stages]
    checkpoints = sorted({c.stage_ref.checkpoint for c in comparisons})
    notes = plan.weights.notes_on_left_out(NOT_COMPARED)
    report = ModelReport(plan.spec, comparisons, not_run, checkpoints=checkpoints, dump=str(plan.path), notes=notes)
    if not as_json:
        for note in plan.dump.notes:
            say(f"note: {note}")
        print_model(console(), report, detail=detail)
    return end_report([report], {}, plan.threads, strict=False, as_json=as_json)
