"""`llorch atlas`: engines that people use, judged stage by stage."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from llorch.cli.options import group, json_option, page_option, verb
from llorch.cli.output import progress, say, to_json

if TYPE_CHECKING:
    from llorch.atlas.catalogue import AtlasEngine
    from llorch.atlas.verdicts import AtlasVerdict

T = TypeVar("T")
_OUTPUT = Path("checkpoints/atlas")
_QUANTISED = "quantised"  # name of all quantised folders


@verb(
    "Measure how far popular engines are from the float64 reference.",
    "llorch atlas mlx-lm --input llama --input llama-theta-old",
    "llorch atlas ctranslate2 --json > ctranslate2.json",
    "llorch atlas --list",
    page="atlas.md",
)
@click.argument("engines", nargs=-1)
@group(
    "Input",
    page_option(
        "--input",
        "inputs",
        multiple=True,
        metavar="NAME",
        help="Input to run, or 'quantised'; repeatable.  [default: all others]",
    ),
)
@group(
    "Environments",
    page_option(
        "--home", type=click.Path(path_type=Path, file_okay=False),
        help="Folder of environments, inputs and runs.  [default: llorch/atlas in your cache folder]",
    ),
    page_option("--yes", is_flag=True, help="Permission to install packages; needed in scripts."),
)  # fmt: skip
@group(
    "Output",
    page_option("--list", "listed", is_flag=True, help="Names of engines and inputs, without a run."),
    page_option(
        "--output", type=click.Path(path_type=Path, file_okay=False),
        help=f"Folder for page, picture, JSON and reports.  [default: {_OUTPUT} for all engines, else none]",
    ),
    json_option("One object {version, date, ..., verdicts}; NaN and infinity become null."),
)  # fmt: skip
def command(
    *, engines: Sequence[str], inputs: Sequence[str], listed: bool, home: Path | None, output: Path | None,
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run other engines, each unmodified and in its own environment, and compare them with the float64 reference.

    Without ENGINES, all run, which takes under half an hour.

    Exit codes: 0 the table is complete, 3 no engine could run.
    """
    from llorch.atlas.catalogue import BY_NAME
    from llorch.atlas.inputs import every_input, quantised_inputs
    from llorch.atlas.run_matrix import fill
    from llorch.atlas.verdicts import NOT_RUN, AtlasVerdict
    from llorch.atlas.write_report import record, write_atlas, write_quantised
    from llorch.builtin import is_wheel
    from llorch.cli.outcome import MISSING
    from llorch.errors import LeftOut

    plain = {each.name: each for each in every_input()}
    quantised = {each.name: each for each in quantised_inputs()}
    if listed:
        click.echo("\n".join(["engines:", *BY_NAME, "inputs:", *plain, f"{_QUANTISED}, which is all of:", *quantised]))
        return
    if is_wheel():
        raise LeftOut("atlas: this wheel does not hold the list of engine packages")
    chosen = [_known(name, BY_NAME, "engine") for name in engines or BY_NAME]
    named = [one for name in inputs for one in (quantised if name == _QUANTISED else (name,))]
    fed = [_known(name, plain | quantised, "input") for name in named or plain]
    whole, only_quantised = not engines and not inputs, all(each.is_quantised for each in fed)
    _require_extras(drawing=whole or (output is not None and not only_quantised))
    _require_consent(chosen, home or _home(), yes=yes)
    with progress("atlas") as tell:
        verdicts = list[AtlasVerdict]()
        for own in fill(chosen, fed, home or _home(), tell):
            verdicts += own
            counted = Counter(each.word for each in own)
            say(f"{own[0].engine}: {', '.join(f'{n} {word}' for word, n in counted.items())}")
        facts = _facts()
        if output and only_quantised:
            write_quantised(verdicts, facts, output, to_json)
        elif output or whole:
            write_atlas(verdicts, facts, home or _home(), output or _OUTPUT, to_json, tell)
    if as_json:
        click.echo(to_json(record(verdicts, facts)))
    else:
        _print_verdicts(verdicts)
    if all(each.word == NOT_RUN for each in verdicts):
        raise click.exceptions.Exit(MISSING)


def _known(name: str, known: "Mapping[str, T]", what: str) -> "T":
    from llorch.errors import suggestion

    if name not in known:
        raise ValueError(f"{what} {name!r}: not in the atlas; see llorch atlas --list" + suggestion(name, known))
    return known[name]


def _require_extras(*, drawing: bool) -> None:
    """Refuse before anything is fetched what could not be judged or drawn."""
    from llorch.errors import MissingExtra

    needed = {"torch": "golden", "transformers": "golden", **({"matplotlib": "train"} if drawing else {})}
    for package, extra in needed.items():
        if find_spec(package) is None:
            raise MissingExtra(extra, package)


def _require_consent(engines: "Sequence[AtlasEngine]", home: Path, *, yes: bool) -> None:
    """Say which packages would be fetched, and go on if the user agrees."""
    from llorch.atlas.environments import download_bytes, is_to_install
    from llorch.cli.outcome import MISSING

    needed = [engine for engine in engines if is_to_install(engine, home)]
    if not needed:
        return
    sizes = ", ".join(f"{engine.name} {download_bytes(engine) / 1e6:.0f} MB" for engine in needed)
    said = f"packages to download from the pip index into {home / 'environments'}: {sizes}"
    if yes:
        say(f"{said}; installing")
    elif sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{said}; llorch cannot ask for consent without a terminal; give --yes to install them")
    elif not click.confirm(f"{said}; install?", default=True, err=True):
        raise click.exceptions.Exit(MISSING)


def _home() -> Path:
    """Return the atlas's folder in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llorch" / "atlas"


def _facts() -> dict[str, str]:
    """Return today's date (UTC), the processor and the versions of transformers and torch, for the report."""
    from llorch.bench import processor

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "transformers": version("transformers"),
        "torch": version("torch"),
    }


def _print_verdicts(verdicts: "Sequence[AtlasVerdict]") -> None:
    from llorch.atlas.verdicts import NOT_RUN
    from llorch.cli.tables import console, print_table, table

    rows = table("engine", "input", "verdict", ">distance", "first wrong stage", "mistake or error message")
    for each in verdicts:
        judged = each.judged
        said = each.said if judged is None else " ".join(filter(None, (judged.mistake, each.correction)))
        rows.add_row(
            " ".join(filter(None, (each.engine, each.way, each.version))), each.input.name,
            each.word.upper() if each.word == NOT_RUN else each.word, f"{judged.error:.1e}" if judged else "",
            judged.key if judged else "", " ".join(said.split())[:120],
        )  # fmt: skip
    print_table(console(), rows)
