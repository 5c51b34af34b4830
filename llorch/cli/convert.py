"""`llorch convert`: convert a model from one file format to the other."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click

from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.outcome import exiting_on_sigterm
from llorch.cli.output import progress, say, to_json

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")


check_option = page_option("--no-check", is_flag=True, help="No comparison of TARGET with what it was made from.")


@verb(
    "Convert between a Hugging Face folder and GGUF.",
    "llorch convert path/to/huggingface-folder model.gguf",
    "llorch convert model.gguf path/to/new-folder --type BF16",
    "llorch convert model.gguf smaller.gguf --type Q4_0",
    page="convert.md",
)
@click.argument("source", type=MODEL)
@click.argument("target", type=PATH)
@group(
    "Output",
    page_option(
        "--type", "type_name", type=click.Choice(TYPES, case_sensitive=False),
        help="Type of the matrices; a folder takes F32, F16 or BF16.  [default: that of SOURCE if possible, else F32]",
    ),
    page_option("--force", is_flag=True, help="Permission to replace TARGET."),
    check_option,
    json_option(
        "One object: source, target, type, n_tensors, n_bytes, fallbacks, kept, decoded, has_vocabulary, notes."
    ),
)  # fmt: skip
def command(*, source: str, target: Path, type_name: str | None, force: bool, no_check: bool, as_json: bool) -> None:
    """Write the model SOURCE as TARGET, in another file format or number type.

    SOURCE is a .gguf file, a Hugging Face folder or a built-in model. A TARGET that ends in .gguf becomes a GGUF file;
    any other name becomes a Hugging Face folder. TARGET never exists half written.
    """
    from llorch.cli.inputs import model_path
    from llorch.files.convert import convert
    from llorch.files.quant import GGMLType

    ggml_type = GGMLType[type_name.upper()] if type_name is not None else None
    with exiting_on_sigterm(), progress(f"converting to {target}") as report:
        output = convert(model_path(source), target, ggml_type=ggml_type, force=force, report=report)
    for note in output.notes:
        say(f"note: {note}")
    if output.fallbacks:
        names = ", ".join(output.fallbacks[:4]) + (", ..." if len(output.fallbacks) > 4 else "")
        reason = f"their rows do not divide into {output.ggml_type.name} blocks"
        say(f"note: {len(output.fallbacks)} matrices are F16; {reason}: {names}")
    say_blocks(output.kept, output.decoded)
    if not no_check:
        from llorch.cli.verify_source import check_output

        check_output(target, model_path(source))
    if as_json:
        names = ("n_tensors", "n_bytes", "fallbacks", "kept", "decoded", "has_vocabulary", "notes")
        values = {name: getattr(output, name) for name in names}
        click.echo(to_json({"source": source, "target": str(target), "type": output.ggml_type.name, **values}))
    else:
        click.echo(f"{target}: {output.ggml_type.name}, {output.n_tensors} tensors, {output.n_bytes / 1e6:.1f} MB")


def say_blocks(kept: Mapping[str, str], decoded: Mapping[str, str]) -> None:
    """Print on stderr how many quantised matrices stayed packed, and why the others were decoded."""
    total = len(kept) + len(decoded)
    for kind, count in Counter(kept.values()).items():
        say(f"note: {count} of {total} quantised matrices stay packed, as {kind}; every number is the same")
    for reason, count in Counter(decoded.values()).items():
        first = next(name for name, decode_reason in decoded.items() if decode_reason == reason)
        say(f"note: {count} of {total} quantised matrices are decoded to floats ({first}, ...): {reason}")
