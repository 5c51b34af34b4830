"""The report of `llorch verify` for a person: a line or a table per model, the first failures, one closing line."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from llorch.cli.judged import TRAINING, JudgedModel, Line, first_failure, lines
from llorch.cli.tables import print_table, table
from llorch.engines import LoadPath
from llorch.judging.expectations.long_contexts import IN_PARTS
from llorch.judging.goldens.float64_reference import WITNESS
from llorch.judging.goldens.forward import PRODUCERS
from llorch.judging.goldens.training import TRUTH
from llorch.judging.judge import Comparison
from llorch.judging.runners.numpy import BACKENDS
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
TRAINING_PRODUCERS = ("llamacpp", "peft")
ENGINES = {"llamacpp": "llama.cpp", "transformers": "transformers", "peft": "PEFT"}
WIDTHS = (20, 5, 7, 7)  # so that the tables of all models line up
_STYLES = {PASS: "green", TIE: "yellow", FAIL: "bold red", NOT_RUN: "yellow"}


def print_line(out: Console, judged: JudgedModel, name_width: int) -> None:
    """Print one line: name, verdict, how many comparisons pass, what llorch was compared with, seconds, exceptions."""
    counts = Counter(row.verdict for row in judged.rows)
    producers = {row.producer for row in judged.rows}
    engines = [name for producer, name in ENGINES.items() if producer in producers]
    engines += ["float64"] if producers & {WITNESS, TRUTH} else []
    exceptions = {**{verdict: counts[verdict] for verdict in (FAIL, TIE)}, NOT_RUN: judged.n_not_run}
    cells = (
        f"{judged.model:<{name_width}}", judged.backend, f"{judged.verdict:<7}",
        f"{f'{counts[PASS]:,} of {len(judged.rows):,}':>16}", f"{', '.join(engines):<38}", f"{judged.seconds:>5.1f} s",
        ", ".join(_format_counts(exceptions)),
    )  # fmt: skip
    line = Text("   ".join(cell for cell in cells if cell))
    line.highlight_words([judged.verdict], _STYLES[judged.verdict])
    out.print(line)


def print_brief_end(out: Console, models: Sequence[JudgedModel], absent: Mapping[str, str], counts: Mapping) -> None:
    """Print the table of each model that failed, the reasons of those that did not run, and one line that counts."""
    failing = (FAIL, TIE) if counts["strict"] else (FAIL,)
    for judged in models:
        if judged.verdict in failing:
            out.print()
            print_model(out, judged, detail=False)
            _print_failure(out, judged)
        elif judged.verdict == NOT_RUN:
            _print_reasons(out, judged)
    _print_absent(out, absent)
    n_not_run = counts["checkpoints_not_run"] + len(counts["cannot_judge"]) + len(absent)
    exceptions = {FAIL: counts["failed"], TIE: counts["ties"], NOT_RUN: n_not_run}
    passed = f"{counts['passed']:,} of {counts['comparisons']:,} comparisons {PASS}"
    text = ", ".join([_count(counts["models"], "model"), passed, *_format_counts(exceptions)])
    out.print(f"{text}; llorch verify -v prints all tables and reasons")


def _format_counts(counts: Mapping[str, int]) -> list[str]:
    return [f"{n:,} {verdict}" for verdict, n in counts.items() if n]


def print_model(out: Console, judged: JudgedModel, *, detail: bool) -> None:
    """Print the table of one model; `detail` has a line per stage and where its row lies, not one per checkpoint."""
    backend = f"   {judged.backend}" if judged.backend else ""
    witness = f"   one reference engine: {judged.witnesses[0]}" if len(judged.witnesses) == 1 else ""
    out.print(Text(judged.model + backend + witness, "bold"))
    if judged.numerics:
        out.print(judged.numerics)
    every = lines(judged, by_stage=detail)
    for line in routes(judged):
        out.print(line)
    training = [line for line in every if line.checkpoint in TRAINING]
    producers = () if judged.dump else PRODUCERS
    _print_lines(out, judged, [line for line in every if line not in training], producers, detail=detail)
    if training:
        _print_lines(out, judged, training, TRAINING_PRODUCERS, detail=detail)
    for row in judged.rows:
        if row.note and row.verdict == PASS and row.model == judged.model:
            out.print(f"{row.stage}, {row.case}: {row.note}")
    _print_reasons(out, judged)
    for tie in _ties(judged):
        out.print(Text(f"{TIE}: {tie}", _STYLES[TIE]))
    if judged.is_users and judged.rows:
        out.print(_ABOUT_FILE)
    out.print()


def _print_reasons(out: Console, judged: JudgedModel) -> None:
    """Print what was not run, and why."""
    for reason in judged.not_run:
        out.print(Text(f"{NOT_RUN}: {reason}", _STYLES[NOT_RUN]))
    for engine, reason in judged.cannot_judge.items():
        out.print(Text(f"{NOT_RUN}: {engine} cannot judge {judged.model}: {reason}", _STYLES[NOT_RUN]))
    for note in judged.notes:
        out.print(f"note: {note}", highlight=False)


def routes(judged: JudgedModel) -> list[str]:
    """Write a line for each load path on which the engine did not read or decode all of the file itself."""
    found: dict[LoadPath, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in judged.rows:
        if row.route is not None and not row.route.is_direct:
            found[row.route][row.producer].add(row.checkpoint)
    return [
        f"{', '.join(f'{p} at {min(at)}' if len(at) == 1 else p for p, at in producers.items())}: {route}"
        for route, producers in found.items()
    ]


def _print_lines(
    out: Console, judged: JudgedModel, found: Sequence[Line], producers: Sequence[str], *, detail: bool
) -> None:
    """Print one table of checkpoints that were compared with the same engines."""
    rows = table("checkpoint", ">rows", ">error", ">llorch", *(f">{p}" for p in producers), ">tolerance", "verdict")
    for column, width in zip(rows.columns, WIDTHS, strict=False):
        column.min_width = width
    rows.columns[-3].min_width = len(PRODUCERS[-1])
    if detail:
        rows.add_column("where", no_wrap=True)
    for line in found:
        name = f"{line.checkpoint:<3} {line.stage or CHECKPOINTS[line.checkpoint]}"
        cells = [name, str(line.n_rows), *_format_errors(line, producers), Text(line.verdict, _STYLES[line.verdict])]
        where = _where(line.closest) + (f", {line.closest.backend}" if judged.backend and line.closest else "")
        rows.add_row(*cells, *([where] if detail else []))
    print_table(out, rows)


def legend(models: Sequence[JudgedModel]) -> str:
    """Explain the columns, for the arithmetics that were judged."""
    if any(judged.dump for judged in models):
        return _DUMP
    exact = _ROWS if any(not judged.numerics and not judged.backend for judged in models) else ""
    backends = [judged.backend for judged in models if judged.backend]
    torch = (
        _TORCH_ROWS.format(split=_SPLIT if re.search("-[dt]p[0-9]", "".join(backends)) else _WAYS) if backends else ""
    )
    training = _TRAINING if any(row.checkpoint in TRAINING for judged in models for row in judged.rows) else ""
    return (
        exact
        + torch
        + (_CASES if exact or torch else "")
        + _COLUMNS
        + (_DERIVED if any(judged.numerics for judged in models) else "")
        + training
    )


def print_end(out: Console, models: Sequence[JudgedModel], absent: Mapping[str, str], counts: Mapping) -> None:
    """Print the legend, what failed first in each model, the backends that nothing ran on, and the closing line."""
    out.print(legend(models))
    for judged in models:
        _print_failure(out, judged)
    _print_absent(out, absent)
    if counts["float64"]:
        out.print(float64_line(counts["float64"]))
    out.print(closing_line(counts))


def _print_failure(out: Console, judged: JudgedModel) -> None:
    """Print what failed first, if anything did."""
    for line in failure_report(judged):
        out.print(Text(line, _STYLES[FAIL]))


def _print_absent(out: Console, absent: Mapping[str, str]) -> None:
    """Print the backends that nothing ran on, and why."""
    for backend, reason in absent.items():
        out.print(Text(f"{NOT_RUN}  {backend}: {reason}", _STYLES[NOT_RUN]))


def float64_line(worst: Mapping) -> str:
    """Format the largest error of llorch's float64 against the float64 reference as one line."""
    place = worst["stage"] if worst["layer"] is None else f"l{worst['layer']}.{worst['stage']}"
    return (
        f"largest distance of llorch's float64 from the float64 reference, {worst['producer']}: "
        f"{_short(worst['error'])} at {place}, {worst['case']}, {worst['mode']}, {worst['model']}"
    )


def failure_report(judged: JudgedModel) -> list[str]:
    """Describe the first failure in the forward order of one model; empty if nothing failed."""
    row = first_failure(judged)
    if row is None:
        return []
    limits = (
        f"error {row.error:.1e} (tolerance {row.tolerance:.1e}), worst element {row.worst:.1e} "
        f"(tolerance {row.tolerance_worst:.1e})"
    )
    exact = f"{row.error:.1%} of the elements differ, expected none"
    of_numpy = row.stage in BY_NAME and row.backend in BACKENDS
    return [
        f"first failing stage of {judged.model}: checkpoint {row.checkpoint} {CHECKPOINTS[row.checkpoint]}: "
        f"{row.stage}, {_where(row)}, {row.backend} against {row.producer}",
        f"  {exact if row.mode == 'exact' else limits}" + (f": {row.note}" if row.note else ""),
        *([f"  {row.stage} is computed by {BY_NAME[row.stage].function}"] if of_numpy else []),
        *_by_case([other for other in judged.rows if (other.stage, other.backend) == (row.stage, row.backend)]),
        *_isolated_failures(judged),
    ]


def _by_case(rows: Sequence[Comparison]) -> list[str]:
    """Write the cases in which rows of one stage fail, and those in which all pass; nothing where no case passes."""
    verdicts: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        verdicts[f"{row.case}, {row.mode}"].add(row.verdict)
    failed = [case for case, found in verdicts.items() if FAIL in found]
    passed = [case for case in verdicts if case not in failed]
    stage = rows[0].stage
    return [f"  {stage} fails: {'; '.join(failed)}", f"  {stage} passes: {'; '.join(passed)}"] if passed else []


def _isolated_failures(judged: JudgedModel) -> list[str]:
    """Write how many rows fail, which stages fail from the golden's inputs, and what that says about the mistake."""
    failing = [row for row in judged.rows if row.verdict == FAIL]
    alone = list(dict.fromkeys(row.stage for row in failing if row.mode == "isolated"))
    modes = {row.mode for row in failing} - {"exact"}  # of choices, which follow from all before them
    is_cached = bool(modes) and modes <= {"decode", IN_PARTS}
    cached = "none; only passes behind cached tokens fail: look at the cache, and at the positions of new tokens"
    found = ", ".join(alone) or (cached if is_cached else "none, so each op is right on those inputs")
    return [f"  {len(failing)} of {len(judged.rows)} rows fail; stages that fail when fed the golden's input: {found}"]


def closing_line(counts: Mapping) -> str:
    """Write the summary in one line."""
    line = f"{_count(counts['models'], 'model')}, {counts['comparisons']} comparisons: {counts['passed']} passed, "
    line += f"{counts['failed']} failed"
    if counts["ties"]:
        line += f", {_count(counts['ties'], 'near-tie')}"
    if counts["checkpoints_not_run"]:
        line += f", {_count(counts['checkpoints_not_run'], 'checkpoint')} not run"
    if counts["cannot_judge"]:
        line += f", {_count(len(counts['cannot_judge']), 'reference engine')} left out, unable to judge"
    if counts["backends_not_run"]:
        line += f", {_count(len(counts['backends_not_run']), 'backend')} not run"
    closer = counts["closer_to_truth"]
    if not closer["numpy"] or counts["failed"]:
        return line
    as_run, large = (_shares(closer[backend]) for backend in ("numpy", "numpy-float32"))
    numbers = {len(names) for names in counts["witnesses"].values() if names}
    one_or_both = "the reference engine" if numbers == {1} else "both reference engines"
    others = "the reference engines of each model" if len(numbers) > 1 else one_or_both
    return (
        f"{line}; llorch's float32 is at least as close to the float64 reference as {others} in {as_run} of "
        f"{closer['numpy']['all']['places']} chained (stage, layer, model) rows; if every sum is in float32, which "
        f"llorch does for matrices above {WIDE_LIMIT:,} elements, in {large}"
    )


def _ties(judged: JudgedModel) -> list[str]:
    """Describe ties, one line per stage and reason, whatever number of backends and engines share them."""
    alike: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for row in judged.rows:
        if row.verdict == TIE:
            alike[row.stage, row.note].append(row)
    found = []
    for (stage, note), rows in alike.items():
        n_backends = len({row.backend for row in rows})
        where = f" of {_count(n_backends, 'backend')}" if judged.backend else ""
        against = " and ".join(dict.fromkeys(row.producer for row in rows))
        found.append(f"{stage}{where} against {against}: {note}")
    return found


def _shares(counts: Mapping) -> str:
    """Format the percentage of places at which llorch is at least as near to float64 as the engines, by case."""
    shares = {case: f"{100 * count['ours'] // count['places']} %" for case, count in counts.items()}
    return f"{shares.pop('all')} ({', '.join(f'{case} {share}' for case, share in shares.items())})"


def _format_errors(line: Line, producers: Sequence[str]) -> list[str]:
    """Format the cells of a line: errors of llorch, float64 reference and engines, then the tolerance."""
    row = line.closest
    if row is None:
        return ["-"] * (3 + len(producers))
    if row.mode == "exact":
        return [_short(row.error), *["-"] * (1 + len(producers)), "exact"]
    theirs = [_short(line.producer_errors[p]) if p in line.producer_errors else "-" for p in producers]
    return [_short(row.error), _short(row.truth_error), *theirs, _short(row.tolerance)]


def _short(number: float) -> str:
    if math.isnan(number):
        return "-"
    return "0" if number == 0 else f"{number:.1e}"


def _where(row: Comparison | None) -> str:
    if row is None:
        return ""
    layer = "" if row.layer is None else f"layer {row.layer}, "
    return f"{layer}{row.case}, {row.mode}"


def _count(n: int, noun: str, several: str = "") -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {several or noun + 's'}"
