"""`llorch learn next`: the lesson to go on with."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_folder, near
from llorch.cli.options import verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson

PAGE = "README.md"


@verb(
    "Show which lesson comes next.",
    "llorch learn next",
    "llorch learn next --impl my_llama",
    "LLORCH_IMPL=my_llama llorch learn next",
)
@impl_option
def command(*, impl: str | None) -> None:
    """Show the first lesson that has not passed, its page and the file to write."""
    folder = learners_folder(impl)
    show_lesson(folder, next_lesson(folder))


def next_lesson(folder: Path, after: "Lesson | None" = None) -> "Lesson | None":
    """Find the first lesson that has not passed, if possible after the given one."""
    from llorch.apps.learn.lessons import LESSONS
    from llorch.apps.learn.progress import LearnerProgress

    progress = LearnerProgress(folder, say)
    standing = progress.read()
    to_do = [lesson for lesson in LESSONS if not progress.is_passed(lesson, standing[lesson.number])]
    behind = to_do if after is None else [each for each in to_do if LESSONS.index(each) > LESSONS.index(after)]
    return next(iter(behind or to_do), None)


def show_lesson(folder: Path, lesson: "Lesson | None") -> None:
    """Print what a lesson is about and where its files are."""
    if lesson is None:
        click.echo("every lesson passes; to record this, run: llorch learn certificate")
        return
    parts = ", ".join(exercise.name for exercise in lesson.parts)
    click.echo(f"{lesson.number} {lesson.name}, {lesson.minutes} min: {parts}")
    page = next(path for path in (lesson.folder / PAGE, lesson.folder.parent / PAGE) if path.exists())
    click.echo(f"  read   {near(page)}")
    click.echo(f"  write  {near(folder / f'{lesson.module}.py')}")
    click.echo(f"  check  llorch learn check {lesson.number}")
