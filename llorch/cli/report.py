"""Report of `llorch verify` for a person: a line or a table per model, the first failures, one closing line.

`verify_summary` explains checkpoint, stage, verdict and mode. A row is one comparison; a table has a line for several.
"""

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
_ABOUT_FILE = (
    "this compares engines that all load this file; if it was converted correctly: llorch verify FILE --source SOURCE"
)
TRAINING_ENGINES = ("llamacpp", "peft")
ENGINE_LABELS = {"llamacpp": "llama.cpp", "transformers": "transformers", "peft": "PEFT"}
WIDTHS = (20, 5, 7, 7)  # minimum widths of the first columns, so that the tables of all models line up
_STYLES = {PASS: "green", TIE: "yellow", FAIL: "bold red", NOT_RUN: "yellow"}


def print_line(out: Console, report: ModelReport, name_width: int) -> None:
    """Print one line: name, verdict, passing comparisons, engines, seconds, and counts of the other verdicts."""
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
    failing = (FAIL, TIE) if counts["strict"] else (FAIL,)  # with --strict a tie fails, too
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
    return [f"{count:,} {verdict}" for verdict, count in counts.items() if count]


def print_model(out: Console, report: ModelReport, *, detail: bool) -> None:
    """Print the table of one model; `detail` prints a line per stage and its location, not one per checkpoint."""
    backend = f"   {report.backend}" if report.backend else ""
    engine = f"   one reference engine: {report.engines[0]}" if len(report.engines) == 1 else ""
    out.print(Text(report.model + backend + engine, "bold"))
    if report.numerics:
        out.print(report.numerics)
    all_lines = lines(report, by_stage=detail)
    for line in routes(report):
        out.print(line)
    training = [line for line in all_lines if line.checkpoint in TRAINING]
    engines = () if report.dump else ENGINES
    _print_lines(out, report, [line for line in all_lines if line not in training], engines, detail=detail)
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
    """Print the checkpoints and engines that did not run, and why."""
    for reason in report.not_run:
        out.print(Text(f"{NOT_RUN}: {reason}", _STYLES[NOT_RUN]))
    for engine, reason in report.unsupported_reason.items():
        out.print(Text(f"{NOT_RUN}: {engine} cannot judge {report.model}: {reason}", _STYLES[NOT_RUN]))
    for note in report.notes:
        out.print(f"note: {note}", highlight=False)


def routes(report: ModelReport) -> list[str]:
    """Write a line for each load path (tools between file and engine) on which an engine did not read all itself."""
    checkpoints: dict[LoadPath, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for comparison in report.comparisons:
        if comparison.load_path is not None and not comparison.load_path.is_direct:
            checkpoints[comparison.load_path][comparison.engine].add(comparison.stage_ref.checkpoint)
    return [
        f"{', '.join(f'{e} at {min(ids)}' if len(ids) == 1 else e for e, ids in engines.items())}: {load_path}"
        for load_path, engines in checkpoints.items()
    ]


def _print_lines(
    out: Console, report: ModelReport, table_lines: Sequence[Line], engines: Sequence[str], *, detail: bool
) -> None:
    """Print one table of checkpoints that were compared with the same engines."""
    rows = table("checkpoint", ">rows", ">error", ">llorch", *(f">{e}" for e in engines), ">tolerance", "verdict")
    for column, width in zip(rows.columns, WIDTHS, strict=False):
        column.min_width = width
    rows.columns[-3].min_width = len(ENGINES[-1])
    if detail:
        rows.add_column("where", no_wrap=True)
    for line in table_lines:
        name = f"{line.checkpoint:<3} {line.stage or CHECKPOINTS[line.checkpoint]}"
        cells = [name, str(line.n_rows), *_format_errors(line, engines), Text(line.verdict, _STYLES[line.verdict])]
        place = _locate(line.closest) + (f", {line.closest.backend}" if report.backend and line.closest else "")
        rows.add_row(*cells, *([place] if detail else []))
    print_table(out, rows)


def legend(models: Sequence[ModelReport]) -> str:
    """Explain the columns, for the numerics and backends that were compared."""
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
    """Print the legend, the first failure of each model, the backends that did not run, and the closing line."""
    out.print(legend(models))
    for report in models:
        _print_failure(out, report)
    _print_absent(out, absent)
    if counts["float64"]:
        out.print(float64_line(counts["float64"]))
    out.print(closing_line(counts))


def _print_failure(out: Console, report: ModelReport) -> None:
    """Print the first failure of a model, if there is one."""
    for line in failure_report(report):
        out.print(Text(line, _STYLES[FAIL]))


def _print_absent(out: Console, absent: Mapping[str, str]) -> None:
    """Print the backends that did not run, and why."""
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
    """Describe the first failure of one model in the order of the forward pass; empty if nothing failed."""
    comparison = first_failure(report)
    if comparison is None:
        return []
    difference, tolerance = comparison.difference, comparison.tolerance
    measured = (
        f"error {difference.error:.1e} (tolerance {tolerance.error:.1e}), worst element {difference.worst:.1e} "
        f"(tolerance {tolerance.worst:.1e})"
    )
    place = comparison.stage_ref.name, comparison.backend
    exact = f"{difference.error:.1%} of the elements differ, expected none"
    stage = BY_NAME.get(comparison.stage_ref.name) if comparison.backend in BACKENDS else None
    return [
        f"first failing stage of {report.model}: checkpoint {comparison.stage_ref.checkpoint} "
        f"{CHECKPOINTS[comparison.stage_ref.checkpoint]}: {comparison.stage_ref.name}, "
        f"{_locate(comparison)}, {comparison.backend} against {comparison.engine}",
        f"  {exact if comparison.mode == 'exact' else measured}" + (f": {comparison.note}" if comparison.note else ""),
        *([f"  {stage.name} is computed by {stage.function}"] if stage else []),
        *_format_cases([c for c in report.comparisons if (c.stage_ref.name, c.backend) == place]),
        *_format_isolated(report),
    ]


def _format_cases(comparisons: Sequence[Comparison]) -> list[str]:
    """List the cases (run of the model, mode) in which a stage fails, and in which it passes; [] if it never passes."""
    verdicts: dict[str, set[str]] = defaultdict(set)
    for comparison in comparisons:
        verdicts[f"{comparison.stage_ref.run}, {comparison.mode}"].add(comparison.verdict)
    failed = [case for case, case_verdicts in verdicts.items() if FAIL in case_verdicts]
    passed = [case for case in verdicts if case not in failed]
    stage = comparisons[0].stage_ref.name
    return [f"  {stage} fails: {'; '.join(failed)}", f"  {stage} passes: {'; '.join(passed)}"] if passed else []


def _format_isolated(report: ModelReport) -> list[str]:
    """Count the failing rows, and name the stages that fail from the golden's inputs, with their meaning."""
    failing = [c for c in report.comparisons if c.verdict == FAIL]
    stages = list(dict.fromkeys(c.stage_ref.name for c in failing if c.mode == "isolated"))
    modes = {c.mode for c in failing} - {"exact"}  # exact comparisons depend on all stages before
    is_cached = bool(modes) and modes <= {"decode", IN_PARTS}
    hint = "none; only passes behind cached tokens fail: look at the cache, and at the positions of new tokens"
    names = ", ".join(stages) or (hint if is_cached else "none, so each op is right on those inputs")
    return [
        f"  {len(failing)} of {len(report.comparisons)} rows fail; "
        f"stages that fail when fed the golden's input: {names}"
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
    as_used, in_float32 = (_shares(closer[backend]) for backend in ("numpy", "numpy-float32"))
    engine_counts = {len(names) for names in counts["engines"].values() if names}
    single_or_both = "the reference engine" if engine_counts == {1} else "both reference engines"
    engines_text = "the reference engines of each model" if len(engine_counts) > 1 else single_or_both
    return (
        f"{line}; llorch's float32 is at least as close to the float64 reference as {engines_text} in {as_used} of "
        f"{closer['numpy']['all']['comparisons']} chained (stage, layer, model) rows; if every sum is in float32, "
        f"which llorch does for matrices above {WIDE_LIMIT:,} elements, in {in_float32}"
    )


def _ties(report: ModelReport) -> list[str]:
    """Describe near-ties of two top tokens, one line per stage and reason, for all backends and engines with it."""
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for comparison in report.comparisons:
        if comparison.verdict == TIE:
            groups[comparison.stage_ref.name, comparison.note].append(comparison)
    descriptions = []
    for (stage, note), comparisons in groups.items():
        n_backends = len({comparison.backend for comparison in comparisons})
        backend_note = f" of {_count(n_backends, 'backend')}" if report.backend else ""
        engines = " and ".join(dict.fromkeys(comparison.engine for comparison in comparisons))
        descriptions.append(f"{stage}{backend_note} against {engines}: {note}")
    return descriptions


def _shares(counts: Mapping) -> str:
    """Format the counts of `closer_to_reference` as percentages, by case."""
    shares = {case: f"{100 * count['llorch'] // count['comparisons']} %" for case, count in counts.items()}
    return f"{shares.pop('all')} ({', '.join(f'{case} {share}' for case, share in shares.items())})"


def _format_errors(line: Line, engines: Sequence[str]) -> list[str]:
    """Format the cells of a line: errors of llorch, float64 reference and engines, then the tolerance."""
    comparison = line.closest
    if comparison is None:
        return ["-"] * (3 + len(engines))
    if comparison.mode == "exact":
        return [_short(comparison.difference.error), *["-"] * (1 + len(engines)), "exact"]
    engine_errors = [_short(line.engine_errors[engine]) if engine in line.engine_errors else "-" for engine in engines]
    errors = (comparison.difference.error, comparison.reference_error)
    return [*map(_short, errors), *engine_errors, _short(comparison.tolerance.error)]


def _short(number: float) -> str:
    if math.isnan(number):
        return "-"
    return "0" if number == 0 else f"{number:.1e}"


def _locate(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    layer = "" if comparison.stage_ref.layer is None else f"layer {comparison.stage_ref.layer}, "
    return f"{layer}{comparison.stage_ref.run}, {comparison.mode}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"
