"""A diagnosis for a person at a terminal: stages up to the first cause, what was found, what could not be shown."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from llorch.cli.tables import print_table, table
from llorch.diagnosis.report.record import count, explained, headline, ranges, short, times, verdict
from llorch.diagnosis.verdict import Diagnosis, Finding, StageCheck
from llorch.runtime.errors import printable
from llorch.stages.comparison import FAIL, NOT_RUN, PASS, ROUNDING
from llorch.stages.table import BY_NAME

_STYLES = {PASS: "green", ROUNDING: "yellow", FAIL: "bold red", NOT_RUN: "yellow"}
_NAME = 40  # characters of a name that others chose
_NOTES = 12  # lines of a list that a table of stages is not


@dataclass(frozen=True)
class _Line:
    """A line of the table: one stage, or several of which this one is nearest to its limit."""

    label: str
    result: StageCheck
    n_stages: int = 1


def print_diagnosis(out: Console, diagnosis: Diagnosis, *, every: bool) -> None:
    """Print a diagnosis; `every` has all stages, one by one, and what was inherited."""
    n_passes = len({result.n_pass for result in diagnosis.results})
    said = f"{count(len(diagnosis.results), 'stage')}, {count(n_passes, 'pass', 'passes')}"
    out.print(Text(f"{printable(diagnosis.model)}   {printable(diagnosis.source)}   {said}", "bold"))
    for arithmetic, n in Counter(result.arithmetic for result in diagnosis.results).items():
        out.print(f"judged as {printable(arithmetic)}: {count(n, 'stage')}")
    for note in diagnosis.notes:
        out.print(f"note: {printable(note)}")
    shown = [_Line(result.key, result) for result in diagnosis.results] if every else list(_diagnosis_lines(diagnosis))
    if shown:
        _print_lines(out, shown, every=every, n_passes=n_passes)
    out.print()
    _print_findings(out, diagnosis)
    _print_not_run(out, diagnosis)
    _print_unseen(out, diagnosis)
    hint = "" if every or len(shown) == len(diagnosis.results) else "; --all shows every stage"
    out.print(Text.assemble((verdict(diagnosis), _STYLES[verdict(diagnosis)]), f": {_closing(diagnosis)}{hint}"))


def _diagnosis_lines(diagnosis: Diagnosis) -> Iterator[_Line]:
    """Yield the lines up to the first cause: its layer stage by stage, all layers before it in one line.

    Without a cause, yield a line for each stage.
    """
    found = diagnosis.failures
    if not found:
        yield from _by_stage(diagnosis.results)
        return
    places = [(result.n_pass, result.key) for result in diagnosis.results]
    first = (found[0].n_pass, found[0].key)
    before = diagnosis.results[: places.index(first) + 1 if first in places else None]
    here = {(result.n_pass, result.layer) for result in before[-1:]}
    for is_whole, group in groupby(before, key=lambda r: r.layer is not None and (r.n_pass, r.layer) not in here):
        results = list(group)
        if is_whole:
            layers = tuple(dict.fromkeys(result.layer for result in results if result.layer is not None))
            yield _Line(ranges(layers), _worst(results), len(results))
        else:
            yield from (_Line(result.key, result) for result in results)


def _by_stage(results: Sequence[StageCheck]) -> Iterator[_Line]:
    for stage in BY_NAME:
        if mine := [result for result in results if result.stage == stage]:
            yield _Line(stage, _worst(mine), len(mine))


def _worst(results: Sequence[StageCheck]) -> StageCheck:
    """Return the result with the largest ratio of error to tolerance."""
    return max(results, key=lambda result: result.over)


def _print_lines(out: Console, lines: Sequence[_Line], *, every: bool, n_passes: int) -> None:
    """Print the lines of a diagnosis as a table."""
    several = [">stages", "closest to its tolerance"] if any(line.n_stages > 1 for line in lines) else []
    passes, total = [">pass"] if n_passes > 1 else [], [">inherited", ">tolerance"] if every else []
    rows = table(
        *passes, "stage", ">local error", ">tolerance", ">error/tolerance", *total, "verdict", *several, "in the dump"
    )
    for line in lines:
        result, local, chained = line.result, line.result.isolated, line.result.chained
        inherited = [short(chained.difference.error), short(chained.tolerance.error)] if chained else ["-", "-"]
        cells = [
            *([str(result.n_pass)] if passes else []),
            line.label,
            local.difference.fault_kind or short(local.difference.error),
            short(local.tolerance.error),
            times(result.over),
            *(inherited if every else []),
            Text(result.verdict, _STYLES[result.verdict]),
            *([str(line.n_stages), result.key if line.n_stages > 1 else ""] if several else []),
            _cut(result.engine_name),
        ]
        rows.add_row(*cells)
    print_table(out, rows)


def _cut(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _NAME else f"{text[: _NAME - 3]}..."


def _print_findings(out: Console, diagnosis: Diagnosis) -> None:
    """Print the first cause at length, and a line for each further finding."""
    found = [*diagnosis.failures, *(each for each in diagnosis.findings if each.kind == "rounding")]
    if not found:
        return
    first, *others = found
    out.print(_headed(first))
    if first.kind != "rounding":
        for cause in first.causes:
            value = f"; found: {printable(cause.value)}" if cause.value else ""
            out.print(f"  {cause.name}: {explained(cause)}{value}")
        if first.alternatives:
            names = ", ".join(cause.name for cause in first.alternatives)
            out.print(
                f"  these mistakes explain the error equally well, and this dump cannot distinguish them: {names}"
            )
        for cause in first.near_misses:
            out.print(f"  near miss: {cause.name}: {printable(cause.sentence.rstrip('.'))}; {explained(cause)}")
        if first.places:
            out.print(f"  shows in {ranges(first.layers)}: {count(len(first.places), 'stage')}")
    for finding in others[:_NOTES]:
        out.print(_headed(finding))
    if len(others) > _NOTES:
        out.print(f"and {len(others) - _NOTES} more; --json and --html have all")
    out.print()


def _headed(finding: Finding) -> Text:
    kind = ROUNDING if finding.kind == "rounding" else FAIL
    return Text.assemble((kind, _STYLES[kind]), f"  {printable(finding.sentence)}")


def _print_not_run(out: Console, diagnosis: Diagnosis) -> None:
    for reason, places in diagnosis.not_run.items():
        names = [*dict.fromkeys(name for _, name in places)]
        more = f" and {len(names) - _NOTES} more" if len(names) > _NOTES else ""
        said = f"  {', '.join(names[:_NOTES])}{more}: {printable(reason)}"
        out.print(Text.assemble((NOT_RUN, _STYLES[NOT_RUN]), said))


def _print_unseen(out: Console, diagnosis: Diagnosis) -> None:
    """Print the known mistakes that the dump cannot show, grouped by reason."""
    if not diagnosis.could_not_show:
        return
    out.print("known mistakes that this dump cannot show:")
    for reason, names in diagnosis.could_not_show.items():
        out.print(f"  {printable(reason)}: {printable(', '.join(names))}")
    out.print()


def _closing(diagnosis: Diagnosis) -> str:
    n_causes = len(diagnosis.failures)
    if not n_causes:
        return headline(diagnosis)
    return f"{count(n_causes, 'cause')} in {count(len(diagnosis.results), 'stage')}"
