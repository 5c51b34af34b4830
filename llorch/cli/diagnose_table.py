"""Print a diagnosis on a terminal: stages up to the first cause, findings, mistakes that the dump cannot show."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from llorch.cli.tables import print_table, table
from llorch.diagnosis.report.record import explained, headline, ranges, short, times, verdict
from llorch.diagnosis.verdict import Diagnosis, Finding, StageCheck, count
from llorch.runtime.errors import printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, ROUNDING
from llorch.stages.table import BY_NAME

_STYLES = {PASS: "green", ROUNDING: "yellow", FAIL: "bold red", NOT_RUN: "yellow"}
_NAME_WIDTH = 40  # characters of a name from the dump
CERTAIN = 0.9999  # share of the error that causes explain, from which on near misses are left out
_MAX_LINES = 12  # most lines of a list other than the table of stages


@dataclass(frozen=True)
class _Row:
    """Line of the table: one stage, or several stages shown by the stage closest to its tolerance."""

    label: str
    result: StageCheck
    n_stages: int = 1


def print_diagnosis(out: Console, diagnosis: Diagnosis, *, every: bool) -> None:
    """Print a diagnosis; `every` prints each stage on its own line, with the error inherited from earlier stages."""
    n_passes = len({result.n_pass for result in diagnosis.results})
    totals = f"{count(len(diagnosis.results), 'stage')}, {count(n_passes, 'pass', 'passes')}"
    out.print(Text(f"{printable(diagnosis.model)}   {printable(diagnosis.source)}   {totals}", "bold"))
    for arithmetic, n in Counter(result.arithmetic for result in diagnosis.results).items():
        out.print(f"judged as {printable(arithmetic)}: {count(n, 'stage')}")
    for note in diagnosis.notes:
        out.print(f"note: {printable(note)}")
    if diagnosis.unchecked_rows:
        out.print(f"note: {diagnosis.unchecked_rows}; the ids of the whole text with --tokens check them")
    rows = [_Row(result.key, result) for result in diagnosis.results] if every else list(_diagnosis_lines(diagnosis))
    if rows:
        _print_lines(out, rows, every=every, n_passes=n_passes)
    out.print()
    _print_findings(out, diagnosis)
    _print_not_run(out, diagnosis)
    if every:
        _print_undetectable(out, diagnosis)
    n_hidden = sum(map(len, diagnosis.could_not_show.values()))
    omitted = [*(["every stage"] if len(rows) < len(diagnosis.results) else [])]
    omitted += [f"the {count(n_hidden, 'known mistake')} that this dump cannot show"] if n_hidden else []
    hint = f"; --all shows {' and '.join(omitted)}" if omitted and not every else ""
    out.print(Text.assemble((verdict(diagnosis), _STYLES[verdict(diagnosis)]), f": {_format_summary(diagnosis)}{hint}"))


def _diagnosis_lines(diagnosis: Diagnosis) -> Iterator[_Row]:
    """Yield the lines up to the first cause: its layer stage by stage, and the layers before it in one line.

    Without a cause, yield a line for each stage.
    """
    failures = diagnosis.failures
    if not failures:
        yield from _lines_by_stage(diagnosis.results)
        return
    keys = [(r.n_pass, r.key) for r in diagnosis.results]
    first = (failures[0].n_pass, failures[0].key)
    lead = diagnosis.results[: keys.index(first) + 1 if first in keys else None]
    last = {(r.n_pass, r.layer) for r in lead[-1:]}
    for joined, group in groupby(lead, key=lambda r: r.layer is not None and (r.n_pass, r.layer) not in last):
        results = list(group)
        if joined:
            layers = tuple(dict.fromkeys(r.layer for r in results if r.layer is not None))
            yield _Row(ranges(layers), _worst(results), len(results))
        else:
            yield from (_Row(r.key, r) for r in results)


def _lines_by_stage(checks: Sequence[StageCheck]) -> Iterator[_Row]:
    for stage in BY_NAME:
        if of_stage := [check for check in checks if check.stage == stage]:
            yield _Row(stage, _worst(of_stage), len(of_stage))


def _worst(results: Sequence[StageCheck]) -> StageCheck:
    """Return the stage with the largest ratio of error to tolerance."""
    return max(results, key=lambda result: result.over)


def _print_lines(out: Console, lines: Sequence[_Row], *, every: bool, n_passes: int) -> None:
    """Print the lines of a diagnosis as a table."""
    groups = [">stages", "closest to its tolerance"] if any(line.n_stages > 1 for line in lines) else []
    passes, total = [">pass"] if n_passes > 1 else [], [">inherited", ">tolerance"] if every else []
    rows = table(
        *passes, "stage", ">local error", ">tolerance", ">error/tolerance", *total, "verdict", *groups, "in the dump"
    )
    for line in lines:
        result, isolated, chained = line.result, line.result.isolated, line.result.chained
        inherited = [short(chained.difference.error), short(chained.tolerance.error)] if chained else ["-", "-"]
        cells = [
            *([str(result.n_pass)] if passes else []), line.label,
            isolated.difference.fault_kind or short(isolated.difference.error), short(isolated.tolerance.error),
            times(result.over), *(inherited if every else []), Text(result.verdict, _STYLES[result.verdict]),
            *([str(line.n_stages), result.key if line.n_stages > 1 else ""] if groups else []),
            _cut(result.engine_name),
        ]  # fmt: skip
        rows.add_row(*cells)
    print_table(out, rows)


def _cut(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."


def _print_findings(out: Console, diagnosis: Diagnosis) -> None:
    """Print the first cause in full, and a line for each further finding."""
    findings = [*diagnosis.failures, *(finding for finding in diagnosis.findings if finding.kind == "rounding")]
    if not findings:
        return
    main, *further = findings
    out.print(_format_finding(main))
    if main.kind != "rounding":
        for cause in main.causes:
            value = f"; found: {printable(cause.value)}" if cause.value else ""
            out.print(f"  {cause.name}: {explained(cause)}{value}")
        if main.alternatives:
            names = ", ".join(cause.name for cause in main.alternatives)
            out.print(
                f"  these mistakes explain the error equally well, and this dump cannot distinguish them: {names}"
            )
        for cause in () if _is_certain(main) else main.near_misses:
            out.print(f"  near miss: {cause.name}: {printable(cause.sentence.rstrip('.'))}; {explained(cause)}")
        if main.places:
            layers = f" in {ranges(main.layers)}" if main.layers else ""
            out.print(f"  shows{layers}: {count(len(main.places), 'stage')}")
    for finding in further[:_MAX_LINES]:
        out.print(_format_finding(finding))
    if len(further) > _MAX_LINES:
        out.print(f"and {len(further) - _MAX_LINES} more; --json and --html have all")
    out.print()


def _is_certain(finding: Finding) -> bool:
    """Tell if the causes leave nothing but rounding, so that a near miss is no help."""
    return bool(finding.causes) and finding.causes[0].explained_share >= CERTAIN


def _format_finding(finding: Finding) -> Text:
    kind = ROUNDING if finding.kind == "rounding" else FAIL
    return Text.assemble((kind, _STYLES[kind]), f"  {printable(finding.sentence)}")


def _print_not_run(out: Console, diagnosis: Diagnosis) -> None:
    for reason, keys in diagnosis.not_run.items():
        names = [*dict.fromkeys(name for _, name in keys)]
        omitted = f" and {len(names) - _MAX_LINES} more" if len(names) > _MAX_LINES else ""
        line = f"  {', '.join(names[:_MAX_LINES])}{omitted}: {printable(reason)}"
        out.print(Text.assemble((NOT_RUN, _STYLES[NOT_RUN]), line))


def _print_undetectable(out: Console, diagnosis: Diagnosis) -> None:
    """Print the known mistakes that the dump cannot show, grouped by reason."""
    if not diagnosis.could_not_show:
        return
    out.print("known mistakes that this dump cannot show:")
    for reason, names in diagnosis.could_not_show.items():
        out.print(f"  {printable(reason)}: {printable(', '.join(names))}")
    out.print()


def _format_summary(diagnosis: Diagnosis) -> str:
    n_causes = len(diagnosis.failures)
    if not n_causes:
        return headline(diagnosis)
    return f"{count(n_causes, 'cause')} in {count(len(diagnosis.results), 'stage')}"
