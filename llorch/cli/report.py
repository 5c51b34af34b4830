"""The report of `llorch verify` for a person: a line or a table per model, the first failures, one closing line."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from llorch.cli.tables import print_table, table
from llorch.cli.verify_summary import TRAINING, Line, ModelReport, first_failure, lines
from llorch.engines import LoadPath
from llorch.judging.expectations.long_contexts import IN_PARTS
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import ENGINES
from llorch.judging.goldens.training import PEFT_FLOAT64
from llorch.judging.runners.numpy import BACKENDS
from llorch.judging.types import Comparison
from llorch.ops.precision import WIDE_LIMIT
from llorch.stages.comparison import FACTOR, FAIL, FLOOR, NOT_RUN, PASS, TIE
from llorch.stages.table import BY_NAME, CHECKPOINTS

_ROWS = (
    "rows: three runs of llorch: in float32, in float32 with every sum in float32 (as in larger models), and\n"
    "in float64 (tolerance 1e-12)\n"
)
_CASES = (
    "cases: near starts at position 0, far in the thousands; long is a text of 1,200 tokens, read whole or in parts\n"
    "isolated: from the golden's inputs; chained: from llorch's own; decode: behind N cached tokens\n"
)
_TORCH_ROWS = (
    "rows: the torch reference implementation{split}\n"
    "in a batch with padding, texts are compared with the golden text, token by token\n"
)
_WAYS, _SPLIT = ", with fused attention, with the fastest kernels, in reproducible mode", ", split over processes"
_COLUMNS = (
    "error: distance of llorch from the golden, in the row closest to its tolerance\n"
    "llorch, llamacpp, transformers, peft: distance of each engine from the float64 reference in that row\n"
    "float64 reference: transformers, with PEFT for training, in pure float64\n"
    f"tolerance: {FACTOR:.0f} times the larger distance of the reference engines, or the rounding error\n"
    f"if that is larger, at least {FLOOR:.1e}; the worst element and every token have separate tolerances\n"
    "each reference engine reads and decodes the file itself, unless a line above the table says otherwise"
)
_DERIVED = "\nnumerics ggml: llama.cpp replaces the float64 reference; tolerances are derived from llama.cpp's numbers"
_TRAINING = (
    "\n18 parameters: the unit of errors is the learning rate; if a gradient is near eps,\n"
    "rounding alone moves a parameter by a part of the learning rate"
)
_DUMP = (
    "error: distance of the engine from llorch's float64, in the row closest to its tolerance\n"
    "isolated: llorch computes the stage from the engine's inputs; chained: llorch runs the same tokens itself\n"
    "tolerance: largest error that the engine's arithmetic explains\n"
    "to find the mistake behind a failure, run llorch diagnose"
)
_ABOUT_FILE = "this compares engines that all load this file; it cannot show that the file was converted correctly"
TRAINING_ENGINES = ("llamacpp", "peft")
ENGINE_LABELS = {"llamacpp": "llama.cpp", "transformers": "transformers", "peft": "PEFT"}
WIDTHS = (20, 5, 7, 7)  # so that the tables of all models line up
_STYLES = {PASS: "green", TIE: "yellow", FAIL: "bold red", NOT_RUN: "yellow"}


def print_line(out: Console, report: ModelReport, name_width: int) -> None:
    """Print one line: name, verdict, how many comparisons pass, what llorch was compared with, seconds, exceptions."""
    counts = Counter(c.verdict for c in report.comparisons)
    compared_engines = {c.engine for c in report.comparisons}
    engines = [name for engine, name in ENGINE_LABELS.items() if engine in compared_engines]
    engines += ["float64"] if compared_engines & {FLOAT64_REFERENCE, PEFT_FLOAT64} else []
    exceptions = {**{verdict: counts[verdict] for verdict in (FAIL, TIE)}, NOT_RUN: report.n_not_run}
    cells = (
        f"{report.model:<{name_width}}", report.backend, f"{report.verdict:<7}",
        f"{f'{counts[PASS]:,} of {len(report.comparisons):,}':>16}", f"{', '.join(engines):<38}",
        f"{report.seconds:>5.1f} s", ", ".join(_format_counts(exceptions)),
    )  # fmt: skip
    line = Text("   ".join(cell for cell in cells if cell))
    line.highlight_words([report.verdict], _STYLES[report.verdict])
    out.print(line)


def print_brief_end(out: Console, models: Sequence[ModelReport], absent: Mapping[str, str], counts: Mapping) -> None:
    """Print the table of each model that failed, the reasons of those that did not run, and one line that counts."""
    failing = (FAIL, TIE) if counts["strict"] else (FAIL,)
    for report in models:
        if report.verdict in failing:
            out.print()
            print_model(out, report, detail=False)
            _print_failure(out, report)
        elif report.verdict == NOT_RUN:
            _print_reasons(out, report)
    _print_absent(out, absent)
    n_not_run = counts["checkpoints_not_run"] + len(counts["unsupported"]) + len(absent)
    exceptions = {FAIL: counts["failed"], TIE: counts["ties"], NOT_RUN: n_not_run}
    passed = f"{counts['passed']:,} of {counts['comparisons']:,} comparisons {PASS}"
    text = ", ".join([_count(counts["models"], "model"), passed, *_format_counts(exceptions)])
    out.print(f"{text}; llorch verify -v prints all tables and reasons")


def _format_counts(counts: Mapping[str, int]) -> list[str]:
    return [f"{n:,} {verdict}" for verdict, n in counts.items() if n]


def print_model(out: Console, report: ModelReport, *, detail: bool) -> None:
    """Print the table of one model; `detail` has a line per stage and where its row lies, not one per checkpoint."""
    backend = f"   {report.backend}" if report.backend else ""
    engine = f"   one reference engine: {report.engines[0]}" if len(report.engines) == 1 else ""
    out.print(Text(report.model + backend + engine, "bold"))
    if report.numerics:
        out.print(report.numerics)
    every = lines(report, by_stage=detail)
    for line in routes(report):
        out.print(line)
    training = [line for line in every if line.checkpoint in TRAINING]
    engines = () if report.dump else ENGINES
    _print_lines(out, report, [line for line in every if line not in training], engines, detail=detail)
    if training:
        _print_lines(out, report, training, TRAINING_ENGINES, detail=detail)
    for comparison in report.comparisons:
        if comparison.note and comparison.verdict == PASS and comparison.model == report.model:
            out.print(f"{comparison.stage_ref.name}, {comparison.stage_ref.run}: {comparison.note}")
    _print_reasons(out, report)
    for tie in _ties(report):
        out.print(Text(f"{TIE}: {tie}", _STYLES[TIE]))
    if report.is_users and report.comparisons:
        out.print(_ABOUT_FILE)
    out.print()


def _print_reasons(out: Console, report: ModelReport) -> None:
    """Print what was not run, and why."""
    for reason in report.not_run:
        out.print(Text(f"{NOT_RUN}: {reason}", _STYLES[NOT_RUN]))
    for engine, reason in report.unsupported_reason.items():
        out.print(Text(f"{NOT_RUN}: {engine} cannot judge {report.model}: {reason}", _STYLES[NOT_RUN]))
    for note in report.notes:
        out.print(f"note: {note}", highlight=False)


def routes(report: ModelReport) -> list[str]:
    """Write a line for each load path on which the engine did not read or decode all of the file itself."""
    found: dict[LoadPath, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for comparison in report.comparisons:
        if comparison.load_path is not None and not comparison.load_path.is_direct:
            found[comparison.load_path][comparison.engine].add(comparison.stage_ref.checkpoint)
    return [
        f"{', '.join(f'{p} at {min(at)}' if len(at) == 1 else p for p, at in engines.items())}: {load_path}"
        for load_path, engines in found.items()
    ]


def _print_lines(
    out: Console, report: ModelReport, found: Sequence[Line], engines: Sequence[str], *, detail: bool
) -> None:
    """Print one table of checkpoints that were compared with the same engines."""
    rows = table("checkpoint", ">rows", ">error", ">llorch", *(f">{p}" for p in engines), ">tolerance", "verdict")
    for column, width in zip(rows.columns, WIDTHS, strict=False):
        column.min_width = width
    rows.columns[-3].min_width = len(ENGINES[-1])
    if detail:
        rows.add_column("where", no_wrap=True)
    for line in found:
        name = f"{line.checkpoint:<3} {line.stage or CHECKPOINTS[line.checkpoint]}"
        cells = [name, str(line.n_rows), *_format_errors(line, engines), Text(line.verdict, _STYLES[line.verdict])]
        where = _where(line.closest) + (f", {line.closest.backend}" if report.backend and line.closest else "")
        rows.add_row(*cells, *([where] if detail else []))
    print_table(out, rows)


def legend(models: Sequence[ModelReport]) -> str:
    """Explain the columns, for the arithmetics that were judged."""
    if any(report.dump for report in models):
        return _DUMP
    exact = _ROWS if any(not report.numerics and not report.backend for report in models) else ""
    backends = [report.backend for report in models if report.backend]
    split = _SPLIT if re.search("-[dt]p[0-9]", "".join(backends)) else _WAYS
    torch = _TORCH_ROWS.format(split=split) if backends else ""
    checkpoints = {c.stage_ref.checkpoint for report in models for c in report.comparisons}
    training = "" if checkpoints.isdisjoint(TRAINING) else _TRAINING
    derived = _DERIVED if any(report.numerics for report in models) else ""
    return exact + torch + (_CASES if exact or torch else "") + _COLUMNS + derived + training


def print_end(out: Console, models: Sequence[ModelReport], absent: Mapping[str, str], counts: Mapping) -> None:
    """Print the legend, what failed first in each model, the backends that nothing ran on, and the closing line."""
    out.print(legend(models))
    for report in models:
        _print_failure(out, report)
    _print_absent(out, absent)
    if counts["float64"]:
        out.print(float64_line(counts["float64"]))
    out.print(closing_line(counts))


def _print_failure(out: Console, report: ModelReport) -> None:
    """Print what failed first, if anything did."""
    for line in failure_report(report):
        out.print(Text(line, _STYLES[FAIL]))


def _print_absent(out: Console, absent: Mapping[str, str]) -> None:
    """Print the backends that nothing ran on, and why."""
    for backend, reason in absent.items():
        out.print(Text(f"{NOT_RUN}  {backend}: {reason}", _STYLES[NOT_RUN]))


def float64_line(worst: Mapping) -> str:
    """Format the largest error of llorch's float64 against the float64 reference as one line."""
    place = worst["stage"] if worst["layer"] is None else f"l{worst['layer']}.{worst['stage']}"
    return (
        f"largest distance of llorch's float64 from the float64 reference, {worst['engine']}: "
        f"{_short(worst['error'])} at {place}, {worst['case']}, {worst['mode']}, {worst['model']}"
    )


def failure_report(report: ModelReport) -> list[str]:
    """Describe the first failure in the forward order of one model; empty if nothing failed."""
    comparison = first_failure(report)
    if comparison is None:
        return []
    difference, tolerance = comparison.difference, comparison.tolerance
    limits = (
        f"error {difference.error:.1e} (tolerance {tolerance.error:.1e}), worst element {difference.worst:.1e} "
        f"(tolerance {tolerance.worst:.1e})"
    )
    place = comparison.stage_ref.name, comparison.backend
    exact = f"{difference.error:.1%} of the elements differ, expected none"
    stage = BY_NAME.get(comparison.stage_ref.name) if comparison.backend in BACKENDS else None
    return [
        f"first failing stage of {report.model}: checkpoint {comparison.stage_ref.checkpoint} "
        f"{CHECKPOINTS[comparison.stage_ref.checkpoint]}: {comparison.stage_ref.name}, "
        f"{_where(comparison)}, {comparison.backend} against {comparison.engine}",
        f"  {exact if comparison.mode == 'exact' else limits}" + (f": {comparison.note}" if comparison.note else ""),
        *([f"  {stage.name} is computed by {stage.function}"] if stage else []),
        *_by_case([other for other in report.comparisons if (other.stage_ref.name, other.backend) == place]),
        *_isolated_failures(report),
    ]


def _by_case(comparisons: Sequence[Comparison]) -> list[str]:
    """Write the cases in which rows of one stage fail, and those in which all pass; nothing where no case passes."""
    verdicts: dict[str, set[str]] = defaultdict(set)
    for comparison in comparisons:
        verdicts[f"{comparison.stage_ref.run}, {comparison.mode}"].add(comparison.verdict)
    failed = [case for case, found in verdicts.items() if FAIL in found]
    passed = [case for case in verdicts if case not in failed]
    stage = comparisons[0].stage_ref.name
    return [f"  {stage} fails: {'; '.join(failed)}", f"  {stage} passes: {'; '.join(passed)}"] if passed else []


def _isolated_failures(report: ModelReport) -> list[str]:
    """Write how many rows fail, which stages fail from the golden's inputs, and what that says about the mistake."""
    failing = [c for c in report.comparisons if c.verdict == FAIL]
    alone = list(dict.fromkeys(c.stage_ref.name for c in failing if c.mode == "isolated"))
    modes = {c.mode for c in failing} - {"exact"}  # of choices, which follow from all before them
    is_cached = bool(modes) and modes <= {"decode", IN_PARTS}
    cached = "none; only passes behind cached tokens fail: look at the cache, and at the positions of new tokens"
    found = ", ".join(alone) or (cached if is_cached else "none, so each op is right on those inputs")
    return [
        f"  {len(failing)} of {len(report.comparisons)} rows fail; "
        f"stages that fail when fed the golden's input: {found}"
    ]


def closing_line(counts: Mapping) -> str:
    """Write the summary in one line."""
    line = f"{_count(counts['models'], 'model')}, {counts['comparisons']} comparisons: {counts['passed']} passed, "
    line += f"{counts['failed']} failed"
    if counts["ties"]:
        line += f", {_count(counts['ties'], 'near-tie')}"
    if counts["checkpoints_not_run"]:
        line += f", {_count(counts['checkpoints_not_run'], 'checkpoint')} not run"
    if counts["unsupported"]:
        line += f", {_count(len(counts['unsupported']), 'reference engine')} left out, unable to judge"
    if counts["backends_not_run"]:
        line += f", {_count(len(counts['backends_not_run']), 'backend')} not run"
    closer = counts["closer_to_reference"]
    if not closer["numpy"] or counts["failed"]:
        return line
    as_run, large = (_shares(closer[backend]) for backend in ("numpy", "numpy-float32"))
    numbers = {len(names) for names in counts["engines"].values() if names}
    one_or_both = "the reference engine" if numbers == {1} else "both reference engines"
    others = "the reference engines of each model" if len(numbers) > 1 else one_or_both
    return (
        f"{line}; llorch's float32 is at least as close to the float64 reference as {others} in {as_run} of "
        f"{closer['numpy']['all']['comparisons']} chained (stage, layer, model) rows; if every sum is in float32, "
        f"which llorch does for matrices above {WIDE_LIMIT:,} elements, in {large}"
    )


def _ties(report: ModelReport) -> list[str]:
    """Describe ties, one line per stage and reason, whatever number of backends and engines share them."""
    alike: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for comparison in report.comparisons:
        if comparison.verdict == TIE:
            alike[comparison.stage_ref.name, comparison.note].append(comparison)
    found = []
    for (stage, note), comparisons in alike.items():
        n_backends = len({c.backend for c in comparisons})
        where = f" of {_count(n_backends, 'backend')}" if report.backend else ""
        against = " and ".join(dict.fromkeys(c.engine for c in comparisons))
        found.append(f"{stage}{where} against {against}: {note}")
    return found


def _shares(counts: Mapping) -> str:
    """Format the percentage of places at which llorch is at least as near to float64 as the engines, by case."""
    shares = {case: f"{100 * count['llorch'] // count['comparisons']} %" for case, count in counts.items()}
    return f"{shares.pop('all')} ({', '.join(f'{case} {share}' for case, share in shares.items())})"


def _format_errors(line: Line, engines: Sequence[str]) -> list[str]:
    """Format the cells of a line: errors of llorch, float64 reference and engines, then the tolerance."""
    comparison = line.closest
    if comparison is None:
        return ["-"] * (3 + len(engines))
    if comparison.mode == "exact":
        return [_short(comparison.difference.error), *["-"] * (1 + len(engines)), "exact"]
    theirs = [_short(line.engine_errors[p]) if p in line.engine_errors else "-" for p in engines]
    errors = (comparison.difference.error, comparison.reference_error)
    return [*map(_short, errors), *theirs, _short(comparison.tolerance.error)]


def _short(number: float) -> str:
    if math.isnan(number):
        return "-"
    return "0" if number == 0 else f"{number:.1e}"


def _where(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    layer = "" if comparison.stage_ref.layer is None else f"layer {comparison.stage_ref.layer}, "
    return f"{layer}{comparison.stage_ref.run}, {comparison.mode}"


def _count(n: int, noun: str, several: str = "") -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {several or noun + 's'}"
