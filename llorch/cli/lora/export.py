"""`llorch lora export`: write an adapter for other programs."""

from pathlib import Path

import click

from llorch.cli.lora.options import any_base_option, force_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.output import say, to_json


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
    force_option,
    json_option("One object: target, n_parameters, n_bytes, notes."),
)
def command(
    *, base: str, adapter: Path, target: Path, vllm_safe: bool, force: bool, any_base: bool, as_json: bool
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
    if as_json:
        values = {"n_parameters": exported.n_parameters, "n_bytes": exported.n_bytes, "notes": exported.notes}
        click.echo(to_json({"target": str(target), **values}))
    else:
        click.echo(f"{target}: {exported.n_parameters} parameters, {exported.n_bytes / 1e6:.2f} MB")
