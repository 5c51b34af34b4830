"""`llorch learn inputs`: what a lesson asks, in a file for any language."""

from pathlib import Path

import click

from llorch.cli.learn.folder import near, one_lesson
from llorch.cli.options import verb
from llorch.cli.output import say


@verb(
    "Write what a lesson asks into a file, for code in any language.",
    "llorch learn inputs 01b -o calls.npz",
    "llorch learn inputs 07 -o block.npz",
    "llorch learn inputs 17 -o gradients.npz",
)
@click.argument("lesson")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A new .npz file.")
def command(*, lesson: str, output: Path) -> None:
    """Write every call of the parts of LESSON: `rope/0007/x` is argument x of call 7 of rope.

    manifest.json in the file lists the calls, which arrays they are given, and the names that their answers have. What
    comes back is judged with llorch learn check 01b --answers answers.npz.
    """
    from llorch.learn.answers import write_calls

    if output.exists():
        raise click.UsageError(f"{output} is there already")
    chosen = one_lesson(lesson)
    n = write_calls(chosen, output)
    say(f"{near(output)}: {n} calls; then llorch learn check {chosen.number} --answers answers.npz")
