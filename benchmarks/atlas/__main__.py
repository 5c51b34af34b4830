"""`python -m benchmarks.atlas`: judge engines that people use, stage by stage."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import click

from benchmarks.atlas import catalogue
from benchmarks.atlas.catalogue import AtlasEngine
from benchmarks.atlas.inputs import every_input, quantised_inputs
from benchmarks.atlas.run_matrix import fill
from benchmarks.atlas.runs import download_bytes, is_to_install
from benchmarks.atlas.verdicts import EngineReport
from benchmarks.atlas.write_report import record, write_atlas, write_quantised
from llorch.apps.bench.measure import processor
from llorch.cli.outcome import MISSING, reported
from llorch.cli.output import progress, say, to_json
from llorch.cli.tables import console, print_table, table
from llorch.runtime.errors import MissingExtra, suggestion
from llorch.stages.comparison import NOT_RUN

T = TypeVar("T")
_OUTPUT = Path("benchmarks/atlas/results")
_QUANTISED = "quantised"  # name for all quantised folders


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("engines", nargs=-1)
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME", help="Input to run, or 'quantised'; repeatable. [all others]"
)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of environments, inputs and runs. [llorch/atlas in your cache folder]",
)
@click.option("--yes", is_flag=True, help="Permission to install packages; needed in scripts.")
@click.option("--list", "listed", is_flag=True, help="Names of engines and inputs, without a run.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder for page, picture, JSON and reports. [{_OUTPUT} for all engines, else none]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One object {version, date, ..., verdicts}; NaN and infinity become null."
)
def main(
    *, engines: Sequence[str], inputs: Sequence[str], listed: bool, home: Path | None, output: Path | None,
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run other engines, each unmodified and in its own environment, and compare them with the float64 reference.

    Without ENGINES, all run, which takes under half an hour.

    Exit codes: 0 the table is complete, 3 no engine could run.
    """
    with reported():
        _run(engines, inputs, home or _home(), output, listed=listed, yes=yes, as_json=as_json)


def _run(
    engine_names: Sequence[str], input_names: Sequence[str], home: Path, output: Path | None,
    *, listed: bool, yes: bool, as_json: bool,
) -> None:  # fmt: skip
    float_inputs = {atlas_input.name: atlas_input for atlas_input in every_input()}
    quantised = {atlas_input.name: atlas_input for atlas_input in quantised_inputs()}
    if listed:
        names = ["engines:", *catalogue.BY_NAME, "inputs:", *float_inputs, f"{_QUANTISED}, which is all of:"]
        click.echo("\n".join([*names, *quantised]))
        return
    engines = [_look_up(name, catalogue.BY_NAME, "engine") for name in engine_names or catalogue.BY_NAME]
    expanded = [member for name in input_names for member in (quantised if name == _QUANTISED else (name,))]
    inputs = [_look_up(name, float_inputs | quantised, "input") for name in expanded or float_inputs]
    is_whole = not engine_names and not input_names
    only_quantised = all(atlas_input.is_quantised for atlas_input in inputs)
    _require_extras(drawing=is_whole or (output is not None and not only_quantised))
    _require_consent(engines, home, yes=yes)
    with progress("atlas") as report_progress:
        verdicts = list[EngineReport]()
        for engine_verdicts in fill(engines, inputs, home, report_progress):
            verdicts += engine_verdicts
            counts = Counter(verdict.label for verdict in engine_verdicts)
            say(f"{engine_verdicts[0].engine}: {', '.join(f'{count} {label}' for label, count in counts.items())}")
        facts = _facts()
        if output and only_quantised:
            write_quantised(verdicts, facts, output, to_json)
        elif output or is_whole:
            write_atlas(verdicts, facts, home, output or _OUTPUT, to_json, report_progress)
    if as_json:
        click.echo(to_json(record(verdicts, facts)))
    else:
        _print_verdicts(verdicts)
    if all(verdict.verdict == NOT_RUN for verdict in verdicts):
        raise click.exceptions.Exit(MISSING)


def _look_up(name: str, table: Mapping[str, T], kind: str) -> T:
    if name not in table:
        hint = suggestion(name, table)
        raise click.UsageError(f"{kind} {name!r}: not in the atlas; see python -m benchmarks.atlas --list{hint}")
    return table[name]


def _require_extras(*, drawing: bool) -> None:
    """Raise before anything is downloaded if a package for judging or drawing is missing."""
    packages = {"torch": "golden", "transformers": "golden", **({"matplotlib": "train"} if drawing else {})}
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise MissingExtra(extra, package)


def _require_consent(engines: Sequence[AtlasEngine], home: Path, *, yes: bool) -> None:
    """Print which packages would be downloaded, and continue if the user agrees."""
    new_engines = [engine for engine in engines if is_to_install(engine, home)]
    if not new_engines:
        return
    sizes = ", ".join(f"{engine.name} {download_bytes(engine) / 1e6:.0f} MB" for engine in new_engines)
    download = f"packages to download from the pip index into {home / 'environments'}: {sizes}"
    if yes:
        say(f"{download}; installing")
    elif sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{download}; a script needs --yes to install them")
    elif not click.confirm(f"{download}; install?", default=True, err=True):
        raise click.exceptions.Exit(MISSING)


def _home() -> Path:
    """Return the atlas's folder in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llorch" / "atlas"


def _facts() -> dict[str, str]:
    """Return today's date (UTC), the processor and the versions of transformers and torch, for the report."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "transformers": version("transformers"),
        "torch": version("torch"),
    }


def _print_verdicts(verdicts: Sequence[EngineReport]) -> None:
    rows = table("engine", "input", "verdict", ">distance", "first wrong stage", "mistake or error message")
    for verdict in verdicts:
        run_report = verdict.run_report
        cause = (
            verdict.message if run_report is None else " ".join(filter(None, (run_report.mistake, verdict.correction)))
        )
        rows.add_row(
            " ".join(filter(None, (verdict.engine, verdict.way, verdict.version))), verdict.input.name,
            verdict.label,
            f"{run_report.error:.1e}" if run_report else "", run_report.key if run_report else "",
            " ".join(cause.split())[:120],
        )  # fmt: skip
    print_table(console(), rows)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.atlas")
