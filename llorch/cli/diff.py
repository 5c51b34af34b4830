"""`llorch diff`: compare two dumps, or draft a mapping of the names of one dump to stages."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from llorch.cli.dump_input import first_position_option, map_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, tokens_option, verb
from llorch.cli.outcome import DIFFERS
from llorch.cli.output import progress, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from llorch.files import Weights
    from llorch.judging.dump_alignment import Parting
    from llorch.judging.dump_diff import Side
    from llorch.stages.comparison import Report

VERSION = 2  # of the --json output


@verb(
    "Compare two dumps, or draft a mapping of names.",
    "llorch diff path/to/a path/to/b",
    "llorch diff path/to/mine trace.safetensors --map names.toml --model story",
    "llorch diff --suggest path/to/mine --model story > names.toml",
    page="diagnose.md",
)
@click.argument("dumps", nargs=-1, required=True, type=PATH, metavar="A [B]")
@group(
    "Input",
    page_option("--model", type=MODEL, help="Model that both ran; needed to compare by stage."),
    map_option,
    page_option("--map-b", type=PATH, help="TOML file for the names of B.  [default: that of --map]"),
    tokens_option("Token ids of the run, if the dumps have none."),
    first_position_option,
)
@group(
    "Output",
    page_option("--suggest", is_flag=True, help="A mapping for A, drafted from shapes and values."),
    json_option("One object {version, sources, first_divergence, stages, only}; NaN and infinity become null."),
)
def command(
    *, dumps: tuple[Path, ...], model: str | None, mapping: Path | None, map_b: Path | None, tokens: list[int] | None,
    first_position: int | None, suggest: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compare dumps A and B of one run, stage by stage, and show where they first differ.

    With --model, passes may differ: a text in one pass and in chunks, with and without a cache, alone and as a row of a
    batch. Stages are then compared by position.

    The comparison does not say which of the two is right; llorch diagnose does.

    Exit code 1: a stage differs by more than the tolerance that the output names.
    """
    if suggest:
        return _suggest(dumps, model, tokens, first_position)
    if len(dumps) != 2:
        raise click.UsageError(f"expected two dumps, A and B, or one dump with --suggest, got {len(dumps)}")
    from llorch.cli.tables import console
    from llorch.diagnosis.report.record import count
    from llorch.judging.dump_alignment import pair_rows

    weights = _open_model(model) if model is not None else None
    if weights is None and (mapping or map_b or tokens):
        raise click.UsageError("--map, --map-b and --tokens go with --model")
    mappings = zip(dumps, (mapping, map_b or mapping), strict=True)
    rows = [_read_rows(path, weights, names, tokens, first_position) for path, names in mappings]
    first_pair, *more_pairs = pair_rows(*rows)
    first = _compare(*first_pair)
    later = (compared for pair in more_pairs if _first_divergence((compared := _compare(*pair)).reports))
    compared = first if _first_divergence(first.reports) else next(later, first)  # the first rows that differ
    if as_json:
        click.echo(to_json(_record(compared)))
    else:
        if len(rows[0]) + len(rows[1]) > 2:
            click.echo(f"{' and '.join(compared.sources)}; {count(len(more_pairs) + 1, 'row')} with equal ids")
        _print_comparison(console(), compared)
    if _first_divergence(compared.reports):
        raise click.exceptions.Exit(DIFFERS)


class _Comparison(NamedTuple):
    """Comparison of two dumps of one row: reports by pass, or one report by position with the parting."""

    sources: tuple[str, str]
    reports: "dict[int, Report]"
    parting: "Parting | None"


def _compare(a: "Side", b: "Side") -> _Comparison:
    """Compare two dumps by position if their passes differ, else pass by pass."""
    from llorch.judging.dump_alignment import align
    from llorch.judging.dump_diff import diff

    report, parting = align(a, b) or (None, None)
    return _Comparison((a.source, b.source), dict(diff(a, b)) if report is None else {0: report}, parting)


def _open_model(model: str) -> "Weights":
    from llorch.cli.inputs import model_path
    from llorch.files import open_weights

    return open_weights(model_path(model))


def _suggest(dumps: tuple[Path, ...], model: str | None, tokens: list[int] | None, first_position: int | None) -> None:
    """Print a draft mapping of the dump's names to stages, found by comparison with a run of the model."""
    if model is None or len(dumps) != 1:
        raise click.UsageError(
            f"--suggest: expected one dump and its --model, got {len(dumps)} dumps{'' if model else ' and no --model'}"
        )
    from llorch.engines.dumps.index import open_raw
    from llorch.engines.dumps.raw import with_earlier_pass
    from llorch.engines.dumps.suggest_mapping import suggest

    with progress(f"comparing {dumps[0]} with a run of {model}"):
        raw = with_earlier_pass(open_raw(dumps[0]), tokens)
        text = suggest(raw, _open_model(model), tokens or (), first_position=first_position or 0)
    click.echo(text, nl=False)


def _read_rows(
    path: Path, weights: "Weights | None", mapping: Path | None, tokens: list[int] | None, first_position: int | None
) -> "list[Side]":
    """Read the rows of a dump: arrays by stage if there are weights, else one row, arrays by their own names."""
    from llorch.engines.dumps.index import open_raw
    from llorch.judging.dump_diff import Side

    if weights is None:
        return [Side.of_names(open_raw(path))]
    from llorch.diagnosis.guards import read_rows, require_read_rightly

    rows = read_rows(path, weights, mapping=mapping, ids=tokens, first_position=first_position)
    return [Side.of_stages(require_read_rightly(dump)) for dump in rows]


def _first_divergence(reports: "dict[int, Report]") -> tuple[int, str] | None:
    """Return pass number and name of the first array that differs, or None."""
    return next(
        ((n_pass, report.first_divergence) for n_pass, report in reports.items() if report.first_divergence), None
    )


def _record(compared: _Comparison) -> dict[str, object]:
    sources, reports, parting = compared
    first = _first_divergence(reports)
    divergence = first and {"pass": first[0], "stage": first[1]}
    if parting is not None:
        divergence = {
            "pass": parting.pass_a, "stage": parting.stage, "position": parting.position, "pass_b": parting.pass_b,
        }  # fmt: skip
    stages = [
        {"pass": n_pass, "stage": name, "error": d.error, "worst": d.worst, "tolerance": report.tolerance.error,
         "index": list(d.index), "a": d.actual, "b": d.expected, "fault": d.fault}
        for n_pass, report in reports.items() for name, d in report.differences.items()
    ]  # fmt: skip
    return {
        "version": VERSION, "sources": sources, "first_divergence": divergence, "stages": stages,
        "only": {side: _names_only_in(reports, side) for side in _SIDES},
    }  # fmt: skip


def _names_only_in(reports: "dict[int, Report]", side: str) -> list[str]:
    return [name for report in reports.values() for name in report.only[_SIDES[side]]]


_SIDES = {"a": "actual", "b": "expected"}  # names of the two sides in `compare`


def _print_comparison(out: "Console", compared: _Comparison) -> None:
    """Print a table of the stages that two dumps share, then the first that differs."""
    from rich.text import Text

    from llorch.cli.tables import print_table, table
    from llorch.runtime.errors import printable

    sources, reports, parting = compared
    rows = table(*([">pass"] if len(reports) > 1 else []), "stage", ">error", ">worst", ">tolerance", "verdict")
    for n_pass, report in reports.items():
        for name, difference in report.differences.items():
            is_within = difference.within(report.tolerance)
            cells = [f"{difference.error:.1e}", f"{difference.worst:.1e}", f"{report.tolerance.error:.1e}"]
            verdict = Text("PASS", "green") if is_within else Text("DIFFERS", "bold red")
            rows.add_row(*([str(n_pass)] if len(reports) > 1 else []), printable(name), *cells, verdict)
    print_table(out, rows)
    for side, source in zip(_SIDES, sources, strict=True):
        if only_names := _names_only_in(reports, side):
            omitted = f" and {len(only_names) - 8} more" if len(only_names) > 8 else ""
            out.print(printable(f"only in {source}: {', '.join(only_names[:8])}{omitted}"))
    divergence, n_stages = _first_divergence(reports), sum(len(report.differences) for report in reports.values())
    if divergence is None:
        out.print(f"{n_stages} stages agree")
    else:
        pass_note = f" of pass {divergence[0]}" if len(reports) > 1 else ""
        if parting is not None:
            pass_note = f" at position {parting.position} (pass {parting.pass_a} of A, pass {parting.pass_b} of B)"
        description = f"{divergence[1]}{pass_note}: {reports[divergence[0]].differences[divergence[1]].describe()}"
        out.print(printable(f"first divergence: {description}"))
