"""`llorch diagnose`: the first wrong stage of somebody's engine, and the mistake."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.dumped import dump_path, first_position_option, map_option
from llorch.cli.options import MODEL, TEXT, json_option, refuse_both, threads_option, tokens_option, verb

if TYPE_CHECKING:
    from llorch.verify.diagnosis.verdict import Diagnosis

_FILE = click.Path(path_type=Path, dir_okay=False)


@verb(
    "Name the first wrong stage of your engine, and the mistake.",
    "llorch diagnose path/to/dump --model path/to/model.gguf",
    "llorch diagnose path/to/dump --model path/to/model.gguf --map names.toml --html report.html",
    "llorch diagnose path/to/trace.safetensors --model path/to/huggingface-folder --tokens 9,4,7 --all",
)
@click.argument("dump", type=dump_path)
@click.option("--model", type=MODEL, required=True, help="What the engine ran: a file, a folder or a built-in name.")
@map_option
@tokens_option("Token ids of the run where the dump does not have them, or of the whole text.")
@click.option("--prompt", type=TEXT, help="The same as text.")
@first_position_option
@click.option(
    "--adapter", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The adapter folder of PEFT that a training step started from: DUMP is one of training.",
)  # fmt: skip
@threads_option
@click.option("--all", "every", is_flag=True, help="Every stage, also those behind the first cause.")
@json_option("One object {version, right, findings, stages, not_run, ...}; NaN and infinity become null.")
@click.option("--junit", type=_FILE, help="Write XML as JUnit does: a test case for each stage.")
@click.option("--html", type=_FILE, help="Write one page for a browser.")
def command(
    *, dump: Path, model: str, mapping: Path | None, tokens: list[int] | None, prompt: str | None,
    first_position: int | None, adapter: Path | None, every: bool, as_json: bool, junit: Path | None, html: Path | None,
) -> None:  # fmt: skip
    """Compare DUMP, what an engine computed, with what MODEL makes of the same numbers, stage by stage.

    DUMP is a folder with index.jsonl (llorch dump-writer prints writers for it), or a .safetensors, .npz or .npy file;
    some stages of some layers do. Every stage is fed the engine's own numbers, so an error is seen where it was made.
    Known mistakes and settings are tried on them: one is named where it leaves nothing of the error but rounding. What
    the engine's arithmetic explains is HONEST, no mistake: half precision, its cache, inputs of products rounded as
    llama.cpp does, as it declares or its numbers show.

    With --adapter DUMP has optimizer steps of a LoRA run, any of: losses, gradients, moments, parameters, under the
    names that llorch.dumps.training_dump lists.

    A stage that needs passes which the dump does not have is NOT RUN; with --tokens of the whole text llorch runs them.

    Exit code 0: nothing is wrong; 1: something is; 2: the dump cannot be read; 3: no stage can be judged. Numbers that
    say nothing beside those of the model are of other tokens (10), of other positions (11), from the other side of a
    norm (12), in a layout that no stage has (13), of other weights (14), or not those of the run in production (15).
    """
    from llorch.cli.diagnosed import print_diagnosis
    from llorch.cli.dumped import require_folders, write_text
    from llorch.cli.outcome import DIFFERS, MISSING
    from llorch.cli.output import to_json
    from llorch.cli.tables import console
    from llorch.verify.report.diagnosis import junit as as_junit
    from llorch.verify.report.diagnosis import record
    from llorch.verify.report.diagnosis_page import page

    refuse_both(prompt, tokens)
    require_folders((junit, html))
    if adapter is not None:
        found = _of_training(dump, model, adapter)
    else:
        found = _diagnosed(dump, model, mapping, tokens, prompt, first_position)
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


def _diagnosed(
    dump: Path, model: str, mapping: Path | None, tokens: list[int] | None, prompt: str | None,
    first_position: int | None,
) -> "Diagnosis":  # fmt: skip
    import numpy as np

    from llorch.cli.dumped import read_stages
    from llorch.cli.inputs import model_path
    from llorch.cli.options import use_threads
    from llorch.cli.output import progress
    from llorch.files import open_weights
    from llorch.model import Model
    from llorch.verify.diagnosis.diagnose import diagnose

    weights = open_weights(model_path(model))
    use_threads(weights.config)
    ids = Model(weights).prompt_ids(prompt) if prompt is not None else tokens
    with progress(f"diagnosing {dump}") as tell:
        stages = read_stages(dump, weights, mapping, ids, first_position)
        return diagnose(weights.astype(np.float64), stages, model=model, say=tell)


def _of_training(dump: Path, model: str, adapter: Path) -> "Diagnosis":
    from llorch.cli.inputs import model_path
    from llorch.cli.output import progress
    from llorch.dumps.index import open_raw
    from llorch.files import open_weights
    from llorch.lora.peft_format import read_peft
    from llorch.verify.diagnosis.training import diagnose_training

    weights = open_weights(model_path(model))
    with progress(f"diagnosing {dump}"):
        return diagnose_training(weights, read_peft(adapter, weights.config), open_raw(dump), model=model)
