"""`llorch diagnose`: the first wrong stage of somebody's engine, and the mistake."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.dump_input import dump_path, first_position_option, map_option
from llorch.cli.options import (
    MODEL,
    TEXT,
    group,
    json_option,
    page_option,
    refuse_both,
    threads_option,
    tokens_option,
    verb,
)

if TYPE_CHECKING:
    from llorch.diagnosis.verdict import Diagnosis

_FILE = click.Path(path_type=Path, dir_okay=False)


@verb(
    "Name the first wrong stage of your engine, and the mistake.",
    "llorch diagnose path/to/dump --model path/to/model.gguf",
    "llorch diagnose path/to/dump --model story --map names.toml --html report.html",
    "llorch diagnose path/to/trace.safetensors --model story --tokens 9,4,7 --all",
    page="diagnose.md",
)
@click.argument("dump", type=dump_path)
@group(
    "Input",
    page_option("--model", type=MODEL, required=True, help="Model that the engine ran: a file, a folder or a name."),
    map_option,
    tokens_option("Token ids of the run, if the dump has none, or of the whole text."),
    page_option("--prompt", type=TEXT, help="Text in place of --tokens."),
    first_position_option,
    page_option(
        "--adapter", type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="PEFT adapter folder that a training step started from, for a dump of training.",
    ),
)  # fmt: skip
@group(
    "Output",
    page_option("--all", "every", is_flag=True, help="All stages, also those after the first cause."),
    json_option("One object {version, right, findings, stages, not_run, ...}; NaN and infinity become null."),
    page_option("--junit", type=_FILE, help="JUnit XML file to write, one test case per stage."),
    page_option("--html", type=_FILE, help="Page for a browser to write."),
)
@threads_option
def command(
    *, dump: Path, model: str, mapping: Path | None, tokens: list[int] | None, prompt: str | None,
    first_position: int | None, adapter: Path | None, every: bool, as_json: bool, junit: Path | None, html: Path | None,
) -> None:  # fmt: skip
    """Find the first wrong stage of an engine and name the mistake, from a dump of its tensors.

    DUMP is a folder with index.jsonl (llorch dump-writer prints a program that writes it), or a .safetensors, .npz or
    .npy file. A dump of some stages of some layers is enough.

    Exit codes: 0 nothing is wrong, 1 something is wrong, 2 the dump cannot be read, 3 no stage can be judged, 10 other
    tokens, 11 other positions, 12 the other side of a norm, 13 an unknown layout, 14 other weights, 15 another run
    than the one in production.
    """
    from llorch.cli.diagnose_table import print_diagnosis
    from llorch.cli.dump_input import require_folders, write_text
    from llorch.cli.outcome import DIFFERS, MISSING
    from llorch.cli.output import to_json
    from llorch.cli.tables import console
    from llorch.diagnosis.report.page import page
    from llorch.diagnosis.report.record import junit as as_junit
    from llorch.diagnosis.report.record import record

    refuse_both(prompt, tokens)
    require_folders((junit, html))
    if adapter is not None:
        found = _diagnose_training(dump, model, adapter)
    else:
        found = _diagnose_stages(dump, model, mapping, tokens, prompt, first_position)
    write_text(junit, lambda: as_junit(found))
    write_text(html, lambda: page(found))
    if as_json:
        click.echo(to_json(record(found)))
    else:
        print_diagnosis(console(), found, every=every)
    if not found.is_right:
        raise click.exceptions.Exit(DIFFERS)
    if not found.results:
        raise click.exceptions.Exit(MISSING)


def _diagnose_stages(
    dump: Path, model: str, mapping: Path | None, tokens: list[int] | None, prompt: str | None,
    first_position: int | None,
) -> "Diagnosis":  # fmt: skip
    """Plan the judging of a dump of a forward pass, and diagnose it."""
    from llorch.cli.dump_input import plan_dump
    from llorch.cli.output import progress
    from llorch.diagnosis.diagnose import diagnose

    plan = plan_dump(dump, model, mapping=mapping, prompt=prompt, tokens=tokens, first_position=first_position)
    with progress(f"diagnosing {dump}") as tell:
        return diagnose(plan.weights, plan.dump, model=model, progress=tell)


def _diagnose_training(dump: Path, model: str, adapter: Path) -> "Diagnosis":
    """Open the model, the adapter and the dump of a training run, and diagnose it."""
    from llorch.cli.inputs import model_path
    from llorch.cli.output import progress
    from llorch.diagnosis.training.diagnose import diagnose_training
    from llorch.engines.dumps.index import open_raw
    from llorch.files import open_weights
    from llorch.lora.peft_format import read_peft

    weights = open_weights(model_path(model))
    with progress(f"diagnosing {dump}"):
        return diagnose_training(weights, read_peft(adapter, weights.config), open_raw(dump), model=model)
