"""`llorch learn inputs`: write the inputs of a lesson to a file for any language."""

from pathlib import Path

import click

from llorch.cli.learn.folder import near, one_lesson
from llorch.cli.options import FILE, group, page_option, verb
from llorch.cli.output import say


@verb(
    "Write the inputs of a lesson to a file, for code in any language.",
    "llorch learn inputs 01b -o calls.npz",
    "llorch learn inputs 07 -o block.npz",
    "llorch learn inputs 17 -o gradients.npz",
)
@click.argument("lesson")
@group("Output", page_option("-o", "--output", type=FILE, required=True, help="New .npz file."))
def command(*, lesson: str, output: Path) -> None:
    """Write the arguments of every call that LESSON makes; rope/0007/x is argument x of call 7 of rope.

    The member manifest.json lists the calls, their arrays and the names of the answers. To judge the answers, type
    llorch learn check 01b --answers answers.npz.
    """
    from llorch.apps.learn.answers import write_calls

    if output.exists():
        raise click.UsageError(f"{output}: already exists; choose another name")
    selected = one_lesson(lesson)
    n_calls = write_calls(selected, output)
    say(f"{near(output)}: {n_calls} calls; next: llorch learn check {selected.number} --answers answers.npz")
