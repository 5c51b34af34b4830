"""`llorch diagnose`: find the first wrong stage of an engine, and the mistake."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llorch.cli.dump_input import first_position_option, map_option
from llorch.cli.options import FILE, MODEL, TEXT, group, json_option, page_option, refuse_both, tokens_option, verb
from llorch.cli.outcome import DIFFERS, MISSING, OK
from llorch.cli.output import progress, to_json
from llorch.cli.threads import threads_option

if TYPE_CHECKING:
    from llorch.diagnosis.verdict import Diagnosis


@verb(
    "Name the first wrong stage of your engine, and the mistake.",
    "llorch diagnose path/to/dump --model path/to/model.gguf",
    "llorch diagnose path/to/dump --model story --map names.toml --html report.html",
    "llorch diagnose path/to/trace.safetensors --model story --tokens 9,4,7 --all",
    page="diagnose.md",
)
@click.argument("dump", type=click.Path(path_type=Path))
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
    page_option("--junit", type=FILE, help="JUnit XML file to write, one test case per stage."),
    page_option("--html", type=FILE, help="Page for a browser to write."),
)
@threads_option
def command(
    *, dump: Path, model: str, adapter: Path | None, every: bool, as_json: bool, junit: Path | None, html: Path | None,
    **opts: Any,
) -> None:  # fmt: skip
    """Find the first wrong stage of an engine and name the mistake, from a dump of its tensors.

    DUMP is a folder with index.jsonl (llorch dump-writer prints a program that writes it), or a .safetensors, .npz or
    .npy file. A dump of some stages of some layers is enough. Each row of a batch is judged as a run of its own.

    Exit codes: 0 nothing is wrong, 1 something is wrong, 2 the dump cannot be read, 3 no stage can be judged, 10 other
    tokens, 11 other positions, 12 the other side of a norm, 13 an unknown layout, 14 other weights, 15 another run
    than the one in production.
    """
    from llorch.cli.diagnose_table import print_diagnosis
    from llorch.cli.dump_input import require_folders, write_text
    from llorch.cli.tables import console
    from llorch.diagnosis.report import page, record

    refuse_both(opts["prompt"], opts["tokens"])
    require_folders((junit, html))
    diagnosis = _diagnose_stages(dump, model, **opts) if adapter is None else _diagnose_training(dump, model, adapter)
    write_text(junit, lambda: record.junit(diagnosis))
    write_text(html, lambda: page.page(diagnosis))
    if as_json:
        click.echo(to_json(record.record(diagnosis)))
    else:
        print_diagnosis(console(), diagnosis, every=every)
    raise click.exceptions.Exit(DIFFERS if not diagnosis.is_right else OK if diagnosis.results else MISSING)


def _diagnose_stages(dump: Path, model: str, **dump_options: Any) -> "Diagnosis":
    """Plan the judging of a dump of a forward pass, and diagnose it."""
    from llorch.cli.dump_input import plan_dump
    from llorch.diagnosis.batch import diagnose_rows

    plan = plan_dump(dump, model, **dump_options)
    with progress(f"diagnosing {dump}") as report:
        return diagnose_rows(plan.weights, plan.rows, model=model, progress=report)


def _diagnose_training(dump: Path, model: str, adapter: Path) -> "Diagnosis":
    """Open the model, the adapter and the dump of a training run, and diagnose it."""
    from llorch.cli.inputs import model_path
    from llorch.diagnosis.training.diagnose import diagnose_training
    from llorch.engines.dumps.index import open_raw
    from llorch.files import open_weights
    from llorch.lora.peft_format import read_peft

    weights = open_weights(model_path(model))
    with progress(f"diagnosing {dump}"):
        return diagnose_training(weights, read_peft(adapter, weights.config), open_raw(dump), model=model)
