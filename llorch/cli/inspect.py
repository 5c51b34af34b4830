"""`llorch inspect`: what is in a model file."""

import click

from llorch.cli.options import MODEL, json_option, verb
from llorch.cli.output import say, to_json


@verb(
    "Show config, tensors and tokenizer of a file.",
    "llorch inspect story",
    "llorch inspect model.gguf --json",
    "llorch inspect path/to/huggingface-folder",
)
@click.argument("file", type=MODEL)
@json_option(
    "One object: path, format, config, tokenizer, metadata, unread, quantisation, tensors, sampled, notes, problems."
)
def command(*, file: str, as_json: bool) -> None:
    """Show the hyperparameters, tokenizer, metadata and tensor table of FILE, and sample its weights.

    The sample is the last row of each tensor. It shows most of the zeros that a file has after an interrupted download.
    `llorch run` and `llorch verify` look at all tensors that they read.

    For a quantised FILE, a summary counts the matrices of each type and gives their bits per weight with scales and
    zero points. The summary also names the modules of floats, and the rounding of activations and KV cache.

    FILE is a .gguf file, a Hugging Face folder or a built-in model. If llorch refuses a part, such as another
    architecture or a missing tensor, stderr names it after the rest, and the exit code is 2.
    """
    from llorch.cli.contents import read_contents
    from llorch.cli.inputs import model_path

    contents = read_contents(model_path(file))
    if as_json:
        click.echo(to_json(contents.plain(), indent=1))
    else:
        contents.print()
    for note in contents.notes:
        say(f"note: {note}")
    for problem in contents.problems:
        click.echo(f"llorch: {problem}", err=True)
    if contents.problems:
        raise click.exceptions.Exit(2)
