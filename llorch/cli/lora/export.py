"""`llorch lora export`: write an adapter for other programs."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.convert import check_option
from llorch.cli.lora.options import any_base_option, force_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.output import say, to_json

if TYPE_CHECKING:
    from llorch.judging.types import Comparison

_MOST_FAULTS = 3  # in a message


@verb(
    "Write an adapter as LoRA GGUF or PEFT directory.",
    "llorch lora export path/to/base path/to/adapter adapter.gguf",
    "llorch lora export path/to/base adapter.gguf path/to/peft-directory",
    "llorch lora export path/to/base path/to/adapter path/to/new --vllm-safe",
    page="lora.md",
)
@click.argument("base", type=MODEL)
@click.argument("adapter", type=PATH)
@click.argument("target", type=PATH)
@any_base_option
@group(
    "Output",
    page_option(
        "--vllm-safe", is_flag=True, help="One rank, one alpha, no patterns, for vLLM and SGLang; scales move into B."
    ),
    check_option,
    force_option,
    json_option("One object: target, n_parameters, n_bytes, notes."),
)
def command(
    *,
    base: str,
    adapter: Path,
    target: Path,
    vllm_safe: bool,
    no_check: bool,
    force: bool,
    any_base: bool,
    as_json: bool,
) -> None:
    """Write ADAPTER as TARGET, for llama.cpp or for PEFT.

    ADAPTER is a PEFT directory or a LoRA GGUF file made for BASE. A TARGET that ends in .gguf becomes a LoRA GGUF file;
    any other name becomes a PEFT directory.
    """
    from llorch.cli.inputs import model_path
    from llorch.lora.export import export

    exported = export(model_path(base), adapter, target, vllm_safe=vllm_safe, force=force, any_base=any_base)
    for note in exported.notes:
        say(f"note: {note}")
    if not no_check:
        check_output(target, adapter, model_path(base))
    if as_json:
        values = {"n_parameters": exported.n_parameters, "n_bytes": exported.n_bytes, "notes": exported.notes}
        click.echo(to_json({"target": str(target), **values}))
    else:
        click.echo(f"{target}: {exported.n_parameters} parameters, {exported.n_bytes / 1e6:.2f} MB")


def check_output(target: Path, source: Path, base: Path) -> None:
    """Compare an adapter file that llorch has just written with its source; CheckpointMismatch if a matrix differs.

    A source in GGUF format is compared as well with the adapter that llorch read from it.
    """
    from llorch.files import open_weights
    from llorch.judging.source.adapter_files import compare_adapter_file
    from llorch.lora.files import read_adapter

    with closing((weights := open_weights(base)).source):
        adapter = read_adapter(source, weights.config)
    if source.is_file():
        _require_pass(compare_adapter_file(source, adapter, weights.config), f"{source} was read wrongly")
    comparisons = compare_adapter_file(target, adapter, weights.config)
    _require_pass(comparisons, f"{target} differs from {source}")
    say(f"checked: {len(comparisons)} matrices with {source} PASS")


def _require_pass(comparisons: "list[Comparison]", message: str) -> None:
    """Raise CheckpointMismatch with the first matrices that differ."""
    from llorch.runtime.errors import CheckpointMismatch
    from llorch.stages.comparison import FAIL

    faults = [f"{c.stage_ref.part}: {c.note}" for c in comparisons if c.verdict == FAIL]
    if faults:
        rest = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        count = f"{len(faults)} of {len(comparisons)} matrices FAIL"
        raise CheckpointMismatch(f"{message}: {count}: {'; '.join(faults[:_MOST_FAULTS])}{rest}")
