"""`llorch lora merge`: merge an adapter into its base."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.convert import TYPES, check_option
from llorch.cli.lora.options import any_base_option, force_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.outcome import exiting_on_sigterm
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
    check_option,
    force_option,
    json_option("One object: target, type, base_types, n_bytes, matrices, logits, notes."),
)  # fmt: skip
@any_base_option
def command(
    *, base: str, adapter: Path, target: Path, type_name: str | None, logits: bool | None, force: bool,
    no_check: bool, any_base: bool, as_json: bool,
) -> None:  # fmt: skip
    """Merge ADAPTER into BASE and write the new model as TARGET.

    BASE is a GGUF file, a Hugging Face folder or a built-in model. ADAPTER is a PEFT directory or a LoRA GGUF file. A
    TARGET that ends in .gguf becomes a GGUF file; any other name becomes a Hugging Face folder.
    """
    from llorch.cli.inputs import model_path
    from llorch.files.quant import GGMLType
    from llorch.training.merge_files import merge

    ggml_type = GGMLType[type_name.upper()] if type_name is not None else None
    with exiting_on_sigterm(), progress(f"merging to {target}") as report:
        merged = merge(
            model_path(base), adapter, target,
            ggml_type=ggml_type, force=force, any_base=any_base, logits=logits, report=report,
        )  # fmt: skip
    for note in merged.notes:
        say(f"note: {note}")
    if not no_check:
        from llorch.cli.verify_source import check_output

        check_output(target, model_path(base), adapter)
    click.echo(to_json(_record(target, merged)) if as_json else "\n".join(_describe(target, merged)))


def _record(target: Path, merged: "Merge") -> dict[str, object]:
    """Return the values of --json."""
    matrices = {name: asdict(change) for name, change in merged.changes.items()}
    values = {"type": merged.ggml_type.name, "base_types": merged.base_types, "n_bytes": merged.n_bytes}
    logits = asdict(merged.logits) if merged.logits else None
    return {"target": str(target), **values, "matrices": matrices, "logits": logits, "notes": merged.notes}


def _describe(target: Path, merged: "Merge") -> Iterator[str]:
    """Yield the lines for a person."""
    worst = max(merged.changes.values(), key=lambda change: change.vanished)
    largest = max(change.change for change in merged.changes.values())
    yield f"{target}: {merged.ggml_type.name}, {merged.n_bytes / 1e6:.1f} MB, {len(merged.changes)} matrices merged"
    yield f"largest change of a weight {largest:.3g}; changes lost to rounding: up to {worst.vanished:.1%} of a matrix"
    if merged.logits is None:
        yield "logits NOT COMPARED (to compare them, add --logits)"
    else:
        effect, error, spread = merged.logits.effect, merged.logits.error, merged.logits.spread
        yield (
            f"logits: the adapter changes them by up to {effect:.3g}, merging by up to {error:.3g} "
            f"(standard deviation {spread:.3g})"
        )
