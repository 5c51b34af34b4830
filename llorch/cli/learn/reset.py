"""`llorch learn reset`: restart a lesson."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_folder, near, one_lesson
from llorch.cli.options import verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson


@verb(
    "Restart a lesson; your file is kept.",
    "llorch learn reset 01b",
    "llorch learn reset rope",
    "llorch learn reset 01 --impl my_llama",
)
@click.argument("lesson")
@impl_option
def command(*, lesson: str, impl: str | None) -> None:
    """Replace your file of LESSON by the stub, and keep your file under another name."""
    reset(learners_folder(impl), one_lesson(lesson))


def reset(folder: Path, lesson: "Lesson") -> None:
    """Rename the learner's file, write the stub, and clear the verdict."""
    from llorch.apps.learn.lessons import stub_of
    from llorch.apps.learn.progress import LearnerProgress, set_aside

    stub, file = stub_of(lesson), folder / f"{lesson.module}.py"
    note = f"; your old file is now {set_aside(file).name}" if file.exists() else ""
    file.write_text(stub, encoding="utf-8")
    with LearnerProgress(folder, say).changed(lesson) as standing:
        standing.status = standing.tried = standing.passed = ""
    click.echo(f"{near(file)} is the stub again{note}")
