"""`llorch lora doctor`: find faults of an adapter that loads without an error."""

from pathlib import Path

import click

from llorch.cli.doctor import JSON_HELP, end_with_report
from llorch.cli.lora.options import any_base_option
from llorch.cli.options import MODEL, group, json_option, page_option, verb
from llorch.cli.output import progress


@verb(
    "Check an adapter for silent faults.",
    "llorch lora doctor path/to/base path/to/adapter",
    "llorch lora doctor story path/to/adapter --against none",
    "llorch lora doctor adapter.gguf --base model.gguf --against llamacpp --json",
    page="lora.md",
)
@click.argument("paths", type=MODEL, nargs=-1, required=True, metavar="[BASE] ADAPTER")
@group(
    "Input",
    page_option(
        "--base", type=MODEL, help="Model of the adapter, where it is no argument: GGUF file, folder, built-in name."
    ),
    any_base_option,
)
@group(
    "Comparison",
    page_option(
        "--against", help="Engines whose logits are compared: peft, llamacpp, peft,llamacpp or none."
        "  [default: both, for models of up to 600 M weights]",
    ),
)  # fmt: skip
@json_option(JSON_HELP)
def command(*, paths: tuple[str, ...], base: str | None, against: str | None, any_base: bool, as_json: bool) -> None:
    """Check ADAPTER, a PEFT directory or a LoRA GGUF file, for faults that no program reports.

    BASE is a GGUF file, a Hugging Face folder or a built-in model; --base gives it, too.
    Each line is one check. BROKEN: the adapter computes something else than you expect. warning: it does in some
    programs. "-": not checked, because something is missing.

    Exit codes: 0 nothing is broken, 1 something is broken.
    """
    from llorch.apps.doctor.adapter import ENGINES, examine
    from llorch.cli.inputs import model_path

    engines = _parse_engines(against, ENGINES)
    model, adapter = _base_and_adapter(paths, base)
    with progress(f"examining {adapter}") as report:
        checks = examine(adapter, model_path(model), against=engines, any_base=any_base, report=report)
    end_with_report(checks, as_json=as_json)


def _base_and_adapter(paths: tuple[str, ...], base: str | None) -> tuple[str, Path]:
    """Return base and adapter of either form: BASE ADAPTER, or ADAPTER --base BASE."""
    *first, adapter = paths
    bases = [*first, *([] if base is None else [base])]
    if len(bases) != 1:
        raise click.UsageError(f"expected one base, as BASE ADAPTER or ADAPTER --base BASE, got {len(bases)}")
    return bases[0], Path(adapter)


def _parse_engines(text: str | None, known_engines: tuple[str, ...]) -> tuple[str, ...] | None:
    """Split the names in `--against`; None if the option is absent, an empty tuple for "none"."""
    if text is None or text == "none":
        return None if text is None else ()
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known_engines]
    if unknown:
        raise click.UsageError(f"--against: expected {', '.join(known_engines)} or none, got {unknown[0]!r}")
    return names
