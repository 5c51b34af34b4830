"""`llorch learn next`: show the next lesson."""

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
    """Find the first lesson that has not passed: one that follows the lesson `after`, or if there is none, any."""
    from llorch.apps.learn.lessons import LESSONS
    from llorch.apps.learn.progress import LearnerProgress

    progress = LearnerProgress(folder, say)
    states = progress.read()
    todo = [lesson for lesson in LESSONS if not progress.is_passed(lesson, states[lesson.number])]
    later = todo if after is None else [lesson for lesson in todo if LESSONS.index(lesson) > LESSONS.index(after)]
    return next(iter(later or todo), None)


def show_lesson(folder: Path, lesson: "Lesson | None") -> None:
    """Print the title of a lesson and the paths of its files."""
    if lesson is None:
        click.echo("every lesson passes; to record this, run: llorch learn certificate")
        return
    parts = ", ".join(exercise.name for exercise in lesson.parts)
    click.echo(f"{lesson.number} {lesson.name}, {lesson.minutes} min: {parts}")
    page = next(path for path in (lesson.folder / PAGE, lesson.folder.parent / PAGE) if path.exists())
    click.echo(f"  read   {near(page)}")
    click.echo(f"  write  {near(folder / f'{lesson.module}.py')}")
    click.echo(f"  check  llorch learn check {lesson.number}")
