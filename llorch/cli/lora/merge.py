"""`llorch lora merge`: base and adapter to one model."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.convert import TYPES, cleaning_up_when_terminated
from llorch.cli.lora.options import any_base_option, force_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.output import progress, say, to_json

if TYPE_CHECKING:
    from llorch.training.merge_files import Merge


@verb(
    "Merge an adapter into its base.",
    "llorch lora merge path/to/base path/to/adapter path/to/merged-folder",
    "llorch lora merge path/to/base path/to/adapter merged.gguf --type Q8_0",
    "llorch lora merge model.gguf adapter.gguf path/to/merged-folder --json",
    page="lora.md",
)
@click.argument("base", type=MODEL)
@click.argument("adapter", type=PATH)
@click.argument("target", type=PATH)
@group(
    "Output",
    page_option(
        "--type", "type_name", type=click.Choice(TYPES, case_sensitive=False),
        help="Type of the matrices; a folder takes F32, F16 or BF16.  [default: the float type of BASE, else F32]",
    ),
    page_option(
        "--logits/--no-logits", default=None,
        help="Comparison of the logits of base, adapter and merged model.  [default: for models of up to 600 M "
        "weights]",
    ),
    force_option,
    json_option("One object: target, type, base_types, n_bytes, matrices, logits, notes."),
)  # fmt: skip
@any_base_option
def command(
    *, base: str, adapter: Path, target: Path, type_name: str | None, logits: bool | None, force: bool,
    any_base: bool, as_json: bool,
) -> None:  # fmt: skip
    """Merge ADAPTER into BASE and write the new model as TARGET.

    BASE is a GGUF file, a Hugging Face folder or a built-in model. ADAPTER is a PEFT directory or a LoRA GGUF file. A
    TARGET that ends in .gguf becomes a GGUF file; any other name becomes a Hugging Face folder.
    """
    from llorch.cli.inputs import model_path
    from llorch.files.quant import GGMLType
    from llorch.training.merge_files import merge

    kind = GGMLType[type_name.upper()] if type_name is not None else None
    with cleaning_up_when_terminated(), progress(f"merging to {target}") as report:
        done = merge(
            model_path(base), adapter, target,
            ggml_type=kind, force=force, any_base=any_base, logits=logits, report=report,
        )  # fmt: skip
    for note in done.notes:
        say(f"note: {note}")
    click.echo(to_json(_record(target, done)) if as_json else "\n".join(_describe(target, done)))


def _record(target: Path, done: "Merge") -> dict[str, object]:
    """Return the values of --json."""
    matrices = {name: asdict(change) for name, change in done.changes.items()}
    values = {"type": done.ggml_type.name, "base_types": done.base_types, "n_bytes": done.n_bytes}
    logits = asdict(done.logits) if done.logits else None
    return {"target": str(target), **values, "matrices": matrices, "logits": logits, "notes": done.notes}


def _describe(target: Path, done: "Merge") -> Iterator[str]:
    """Yield the lines for a person."""
    worst = max(done.changes.values(), key=lambda change: change.vanished)
    largest = max(change.change for change in done.changes.values())
    yield f"{target}: {done.ggml_type.name}, {done.n_bytes / 1e6:.1f} MB, {len(done.changes)} matrices merged"
    yield f"largest change of a weight {largest:.3g}; changes lost to rounding: up to {worst.vanished:.1%} of a matrix"
    if done.logits is None:
        yield "logits NOT COMPARED (to compare them, add --logits)"
    else:
        effect, error, spread = done.logits.effect, done.logits.error, done.logits.spread
        yield (
            f"logits: the adapter changes them by up to {effect:.3g}, merging by up to {error:.3g} "
            f"(standard deviation {spread:.3g})"
        )
