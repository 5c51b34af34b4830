"""`llorch verify FILE --source SOURCE`: is this file what it was made from?"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast
from xml.etree import ElementTree

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llorch.cli.inputs import model_path
from llorch.cli.model_options import ModelOptions
from llorch.cli.outcome import DIFFERS, OK
from llorch.cli.output import progress, say, to_json
from llorch.cli.report import print_end, print_model
from llorch.cli.tables import console, print_table, table
from llorch.cli.threads import allowed_cores
from llorch.cli.verify_plan import VERSION, LiveInput, judge_model
from llorch.cli.verify_summary import ModelReport, summary
from llorch.files import open_gguf, open_weights
from llorch.files.opening import open_table
from llorch.judging.source.adapters import MergedTensors
from llorch.judging.source.compare import SourceReport, compare_with_source
from llorch.judging.source.tensors import WeightReport
from llorch.judging.types import Comparison
from llorch.lora.files import read_adapter
from llorch.ops.numerics import EXACT
from llorch.runtime.errors import CheckpointMismatch, UserError, printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, TIE

if TYPE_CHECKING:
    from llorch.apps.evaluate.scores import ModelDifference

PARTS = ("settings", "tokenizer", "weights")
HUB = "https://huggingface.co/"
_CONTEXT = 64  # tokens of a window of the built-in text
_MOST_LINES = 12  # failures, and notes, that are printed without --detail
_TEXT = (
    "The river froze in January, and for 11 weeks nobody crossed it by boat. In March the ice broke with a sound like "
    "thunder; by the 3rd of April the first barge came down from the hills with salt, timber and 240 barrels of oil. "
    "def area(width, height):\n    return width * height\n\nWater boils at 100 degrees Celsius at sea level. "
    "Question: what is the capital of France? Answer: Paris. Le livre est sur la table, et la porte est ouverte."
)


@dataclass(frozen=True)
class SourceInput:
    """Files of a comparison with a source.

    Attributes:
        spec: The file, as the user typed it.
        source: SOURCE of `--source`; empty for the base that the file names.
        adapter: Adapter that was merged into the source, if there is one.
    """

    spec: str
    source: str
    adapter: Path | None = None

    def __str__(self) -> str:
        return f"{self.spec}, made from {self.source}" + (f" and {self.adapter}" if self.adapter else "")


def verify_source(
    names: SourceInput, options: ModelOptions, inputs: LiveInput, *,
    with_stages: bool, strict: bool, as_json: bool, detail: bool, junit: Path | None,
) -> int:  # fmt: skip
    """Compare a file with its source, then its stages with the engines; report, and return the exit code."""
    path = model_path(names.spec)
    names = names if names.source else replace(names, source=_choose_base(path, names.spec))
    source_path = model_path(names.source)
    report = compare(path, source_path, names)
    if junit is not None:
        junit.write_text(_to_junit(names, report), encoding="utf-8")
    out = console()
    if not as_json:
        _print_report(out, names, report, detail=detail)
    reports = [ModelReport(names.spec, report.comparisons, checkpoints=("00",))]
    scores, not_run = None, ""
    if with_stages and not report.failures:
        reports.append(judge_model(names.spec, options, inputs))
        scores, not_run = _score(path, source_path, names)
    if as_json:
        rows = [comparison.record() for model_report in reports for comparison in model_report.comparisons]
        causes, quality = [asdict(cause) for cause in report.causes], scores and asdict(scores)
        click.echo(to_json({
            "version": VERSION, "comparisons": rows, "causes": causes, "smallest_errors": report.smallest_errors,
            "quality": quality, "summary": summary(reports),
        }))  # fmt: skip
    else:
        for stages in reports[1:]:
            if not stages.comparisons:
                out.print(f"stages {NOT_RUN}: {'; '.join(stages.not_run)}")
                continue
            print_model(out, stages, detail=detail)
            print_end(out, [stages], {}, summary([stages]))
        _print_scores(out, scores, not_run)
    failing = (FAIL, TIE) if strict else (FAIL,)
    return DIFFERS if any(c.verdict in failing for model_report in reports for c in model_report.comparisons) else OK


def compare(path: Path, source_path: Path, names: SourceInput) -> SourceReport:
    """Compare a file with its source, and show progress."""
    file, source = open_table(path, is_complete=False), open_weights(source_path)
    with closing(file.source), closing(source.source), progress(f"comparing {names}") as report_step:
        tensors = None
        if names.adapter is not None:
            tensors = MergedTensors(source, read_adapter(names.adapter, source.config))
        return compare_with_source(
            file, source, tensors, model=names.spec, n_threads=allowed_cores(), progress=report_step
        )


def check_output(path: Path, source_path: Path, adapter: Path | None = None) -> None:
    """Compare a file that llorch has just written with its source; CheckpointMismatch with the causes if it differs."""
    names = SourceInput(str(path), str(source_path), adapter)
    report = compare(path, source_path, names)
    if report.failures:
        first = [cause.sentence for cause in report.causes] + [_describe(failure) for failure in report.failures]
        raise CheckpointMismatch(f"{names}: {len(report.failures)} comparisons FAIL: {'; '.join(first[:3])}")
    say(f"checked: {len(report.comparisons)} comparisons with {source_path} PASS")


def _choose_base(path: Path, spec: str) -> str:
    """Return the base that a file names, after asking; UsageError if it names none, or nobody can be asked."""
    base = _named_base(path)
    if not base:
        raise click.UsageError(f"--source: {spec} names no model that it was made from; give --source SOURCE")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"--source: {spec} names {base}; give --source {base}, or the folder of it")
    click.confirm(f"{spec} names {base}; compare with that?", default=True, abort=True, err=True)
    return base


def _named_base(path: Path) -> str:
    """Read the name of the base from the metadata of a GGUF file, or from the model card of a folder."""
    if path.is_dir():
        card = (path / "README.md").read_text(encoding="utf-8") if (path / "README.md").is_file() else ""
        match = re.search(r"^base_model:\s*(?:-\s*)?([\w.-]+/[\w.-]+)\s*$", card.partition("\n---")[0], re.MULTILINE)
        return match[1] if match else ""
    with open_gguf(path) as file:
        # The source is what the file was converted from; the base may be what the source was trained from.
        keys = ("general.source.huggingface.repository", "general.source.repo_url", "general.base_model.0.repo_url")
        named = (file.metadata.get(key) for key in keys)
        return next((str(name).removeprefix(HUB) for name in named if isinstance(name, str) and name), "")


def _score(path: Path, source_path: Path, names: SourceInput) -> "tuple[ModelDifference | None, str]":
    """Compute perplexity and KL divergence on the built-in text, or return the reason why they were not run."""
    if names.adapter is not None:
        return None, "the source has an adapter"
    from llorch.apps.evaluate.windows import cut_text
    from llorch.cli.quality import load_fitting, score_models

    try:
        models = load_fitting([source_path, path], EXACT, "auto", _CONTEXT)
        scores = score_models(models, cut_text(models, _TEXT, context=_CONTEXT))
    except (MemoryError, UserError) as error:
        return None, str(error)
    return cast("ModelDifference", scores), ""


def _print_report(out: Console, names: SourceInput, report: SourceReport, *, detail: bool) -> None:
    """Print the tables, the causes, the failures that no cause explains, and the notes."""
    out.print(Text(str(names), "bold"))
    rows = table("part", ">compared", ">FAIL", "verdict")
    for part in PARTS:
        counts = Counter(c.verdict for c in report.comparisons if c.stage_ref.stage == part)
        rows.add_row(
            part, str(counts.total()), str(counts[FAIL]), FAIL if counts[FAIL] else PASS if counts else NOT_RUN
        )
    print_table(out, rows)
    out.print()
    print_table(out, _weights_table(report, detail=detail))
    for cause in report.causes:
        out.print(f"{FAIL} {cause.sentence}")
    explained = {name for cause in report.causes for name in cause.stages}
    _print_lines(out, [f"{FAIL} {_describe(c)}" for c in report.failures if c.stage_ref.part not in explained], detail)
    notes = Counter(c.note if c.stage_ref.stage == "weights" else _describe(c) for c in report.notes)
    _print_lines(out, [f"note: {note}" + (f" ({n} tensors)" if n > 1 else "") for note, n in notes.items()], detail)
    n_failed, n_all = len(report.failures), len(report.comparisons)
    verdict = f"{n_all - n_failed:,} of {n_all:,} comparisons {PASS}" + (f", {n_failed:,} {FAIL}" if n_failed else "")
    out.print(f"{names}: {verdict}")


def _weights_table(report: SourceReport, *, detail: bool) -> Table:
    """Make the table of the weights: a line for each pair of types, or with `detail` for each weight."""
    rows = table(
        "weights" if detail else ">weights", "type", "from", ">error", ">FAIL", "verdict", "smallest error seen"
    )
    groups: dict[tuple[str, ...], list[WeightReport]] = defaultdict(list)
    for weight in report.weights:
        types = tuple(kind.name for kind in weight.types)
        groups[(weight.name, *types) if detail else ("", *types)].append(weight)
    for (name, kind, source_kind), weights in groups.items():
        n_wrong = sum(bool(weight.wrong) for weight in weights)
        error = max(weight.error for weight in weights)
        smallest = "" if detail else report.smallest_errors.get(kind, "")
        verdict = FAIL if n_wrong else PASS
        rows.add_row(name or str(len(weights)), kind, source_kind, f"{error:.1e}", str(n_wrong), verdict, smallest)
    return rows


def _print_lines(out: Console, lines: Sequence[str], detail: bool) -> None:
    n_lines = len(lines) if detail else _MOST_LINES
    for line in lines[:n_lines]:
        out.print(line)
    if len(lines) > n_lines:
        out.print(f"and {len(lines) - n_lines} more, see --detail")


def _describe(comparison: Comparison) -> str:
    """Describe a comparison in one line."""
    stage, part, note = comparison.stage_ref.stage, comparison.stage_ref.part, comparison.note
    return f"{stage}: {note}" if note.startswith(part) else f"{stage}: {part}: {note}"


def _print_scores(out: Console, scores: "ModelDifference | None", not_run: str) -> None:
    if scores is not None:
        ratio, kl = scores.perplexity_ratio, scores.kl
        figures = (
            f"perplexity {scores.perplexity.value:.4g}, {ratio.value:.4f} of the source's; KL divergence {kl.value:.2g}"
        )
        out.print(f"on a built-in text of {scores.n_scored} tokens, for information: {figures}")
    elif not_run:
        out.print(f"perplexity and KL divergence {NOT_RUN}: {not_run}")


def _to_junit(names: SourceInput, report: SourceReport) -> str:
    """Write JUnit XML: one test suite for each part, one test case for each comparison."""
    top = ElementTree.Element("testsuites", name=printable(f"llorch verify {names}"))
    for part in PARTS:
        comparisons = [c for c in report.comparisons if c.stage_ref.stage == part]
        n_failed = sum(c.verdict == FAIL for c in comparisons)
        counts = {"tests": str(len(comparisons)), "failures": str(n_failed), "errors": "0", "skipped": "0"}
        suite = ElementTree.SubElement(top, "testsuite", {"name": part} | counts)
        for comparison in comparisons:
            name = printable(comparison.stage_ref.part)
            case = ElementTree.SubElement(suite, "testcase", classname=printable(names.spec), name=name)
            if comparison.verdict == FAIL:
                ElementTree.SubElement(case, "failure", message=printable(comparison.note), type=part)
    return ElementTree.tostring(top, encoding="unicode") + "\n"
