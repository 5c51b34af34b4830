"""`llorch learn hint`: print hints for a part (function) of a lesson in three steps, one more at each call."""

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
    """Record one more hint for the part, and print all hints so far."""
    from llorch.apps.learn.lessons import hints_of
    from llorch.apps.learn.progress import LearnerProgress

    hints = hints_of(lesson)
    if part is not None and part not in hints:
        raise click.UsageError(f"lesson {lesson.number} has no part {part!r}{suggestion(part, hints)}")
    with LearnerProgress(folder, say).changed(lesson) as standing:
        part = part or _choose_part(folder, lesson, standing.hints, wrong=standing.wrong)
        n_hints = standing.hints[part] = min(standing.hints.get(part, 0) + 1, len(hints[part]))
    for step, text in enumerate(hints[part][:n_hints], start=1):
        click.echo(f"{part}, hint {step} of {len(hints[part])}\n\n{text.strip()}\n")


def _choose_part(folder: Path, lesson: "Lesson", n_taken: dict[str, int], *, wrong: str) -> str:
    """Choose the part that failed the last check (`wrong`), else the first that is not written.

    Else choose the first that has hints left, by the number of hints taken (`n_taken`), else the first.
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
    with_hints_left = [name for name in hints if n_taken.get(name, 0) < len(hints[name])]
    return next(iter([*(name for name in hints if name in unwritten), *with_hints_left, *hints]))
