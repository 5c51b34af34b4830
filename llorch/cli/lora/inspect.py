"""`llorch lora inspect`: show the contents of an adapter."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.lora.options import any_base_option
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.output import say, to_json

if TYPE_CHECKING:
    from llorch.lora.summary import Summary


@verb(
    "Show rank, scale and weight of an adapter.",
    "llorch lora inspect path/to/adapter",
    "llorch lora inspect path/to/adapter --base story",
    "llorch lora inspect adapter.gguf --base path/to/base --json",
    page="lora.md",
)
@click.argument("adapter", type=PATH)
@group(
    "Input",
    page_option("--base", type=MODEL, help="Model of the adapter, to check shapes and compare norms."),
    any_base_option,
)
@json_option("One object: path, format, config, base, dtypes, n_parameters, matrices, problems.")
def command(*, adapter: Path, base: str | None, any_base: bool, as_json: bool) -> None:
    """Show how much ADAPTER, a PEFT directory or a LoRA GGUF file, adds to each matrix of its base.

    The norm is that of scaling * B A. A norm of 0 means that the matrix was never trained. If llorch refuses a part,
    stderr names it after the rest, and the exit code is 2.
    """
    from llorch.cli.inputs import model_path
    from llorch.files import open_weights
    from llorch.lora.files import adapter_for
    from llorch.lora.summary import summarise

    weights = open_weights(model_path(base)) if base is not None else None
    summary = summarise(adapter, weights)
    if as_json:
        values = asdict(summary) | {"path": str(summary.path)}
        click.echo(to_json(values, indent=1))
    else:
        _print_summary(summary)
    for problem in summary.problems:
        say(f"llorch: {adapter}: {problem}")
    if weights is not None:
        _, verdict = adapter_for(weights, adapter, any_base=any_base)
        say(verdict)
    if summary.problems:
        raise click.exceptions.Exit(2)


def _print_summary(summary: "Summary") -> None:
    from llorch.cli.tables import console, print_table, table

    out = console()
    out.print(f"{summary.path}: {summary.format}, {', '.join(summary.dtypes)}, {summary.n_parameters} parameters")
    out.print(f"base: {summary.base or 'not recorded'}")
    for name, value in asdict(summary.config).items() if summary.config is not None else ():
        if value not in ((), {}, None):
            out.print(f"{name}: {', '.join(map(str, value)) if isinstance(value, tuple) else value}")
    rows = table("matrix", ">r", ">scaling", ">parameters", ">norm", ">share of base norm")
    for matrix in summary.matrices:
        share = "-" if matrix.relative is None else f"{matrix.relative:.2%}"
        norm = f"{matrix.norm:.4g}"
        rows.add_row(matrix.path, str(matrix.rank), f"{matrix.scaling:.4g}", str(matrix.n_parameters), norm, share)
    out.print()
    print_table(out, rows)
