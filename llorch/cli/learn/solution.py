"""`llorch learn solution`: print the functions of a lesson."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_folder, one_lesson
from llorch.cli.options import verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson


@verb(
    "Show the solution of a lesson.",
    "llorch learn solution 01b",
    "llorch learn solution rope --impl my_llama",
    "llorch learn solution 01 >> l01_rms_norm.py",
)
@click.argument("lesson")
@impl_option
def command(*, lesson: str, impl: str | None) -> None:
    """Show the functions of LESSON, ready to paste into your file.

    A solution is always allowed; your progress records it.
    """
    show_solution(learners_folder(impl), one_lesson(lesson))


def show_solution(folder: Path, lesson: "Lesson") -> None:
    """Print the last hint of every part, and record that the solution was seen."""
    from llorch.apps.learn.lessons import hints_of
    from llorch.apps.learn.progress import LearnerProgress

    with LearnerProgress(folder, say).changed(lesson) as standing:
        standing.solution = True
    click.echo("\n\n\n".join(steps[-1].strip() for steps in hints_of(lesson).values()))
