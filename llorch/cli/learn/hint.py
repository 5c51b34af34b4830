"""`llorch learn hint`: three steps for every part, one more at each call."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_folder, one_lesson
from llorch.cli.options import verb
from llorch.cli.output import say
from llorch.runtime.errors import suggestion

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson


@verb(
    "Give a hint, one step more at each call.",
    "llorch learn hint 01b",
    "llorch learn hint 01b rope",
    "llorch learn hint rms_norm --impl my_llama",
)
@click.argument("lesson")
@click.argument("part", required=False)
@impl_option
def command(*, lesson: str, part: str | None, impl: str | None) -> None:
    """Give the next hint for a function (PART) of LESSON: a direction, the formula with shapes, then the code.

    Without PART, the hint is for the function that failed the last check, else for the first unwritten one. llorch
    keeps the number of hints you have seen.
    """
    show_hint(learners_folder(impl), one_lesson(lesson), part)


def show_hint(folder: Path, lesson: "Lesson", part: str | None = None) -> None:
    """Take one step more and print all so far."""
    from llorch.apps.learn.lessons import hints_of
    from llorch.apps.learn.progress import LearnerProgress

    hints = hints_of(lesson)
    if part is not None and part not in hints:
        raise click.UsageError(f"lesson {lesson.number} has no part {part!r}{suggestion(part, hints)}")
    with LearnerProgress(folder, say).changed(lesson) as standing:
        part = part or _in_work(folder, lesson, standing.hints, wrong=standing.wrong)
        n = standing.hints[part] = min(standing.hints.get(part, 0) + 1, len(hints[part]))
    for step, text in enumerate(hints[part][:n], start=1):
        click.echo(f"{part}, hint {step} of {len(hints[part])}\n\n{text.strip()}\n")


def _in_work(folder: Path, lesson: "Lesson", taken: dict[str, int], *, wrong: str) -> str:
    """Choose the part that the last check called wrong, else the first that is not written.

    Else it is the first that has hints left, else the first.
    """
    from llorch.apps.learn.folder import unwritten_in
    from llorch.apps.learn.lessons import hints_of

    hints = hints_of(lesson)
    if wrong in hints:
        return wrong
    try:
        unwritten = unwritten_in(ast.parse((folder / f"{lesson.module}.py").read_bytes()))
    except (OSError, SyntaxError, ValueError):
        unwritten = set(hints)
    left = [name for name in hints if taken.get(name, 0) < len(hints[name])]
    return next(iter([*(name for name in hints if name in unwritten), *left, *hints]))
