"""`llorch learn progress`: how far somebody is."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_folder
from llorch.cli.options import json_option, verb
from llorch.cli.output import say, to_json

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson
    from llorch.apps.learn.progress import Standing


@verb(
    "Show your progress.",
    "llorch learn progress",
    "llorch learn progress --json",
    "llorch learn progress --impl my_llama",
)
@impl_option
@json_option("One object: version, passed, minutes_left, and the lessons of progress.json.")
def command(*, impl: str | None, as_json: bool) -> None:
    """Sum up lessons, attempts and hints from .llorch/progress.json in your folder."""
    folder = learners_folder(impl)
    click.echo(_as_json(folder) if as_json else summed_up(folder))


def summed_up(folder: Path) -> str:
    """Format the state of all lessons in a folder as one line."""
    from llorch.apps.learn.lessons import LESSONS

    standing, passed, left = _read_standing(folder)
    hints = sum(sum(each.hints.values()) for each in standing.values())
    attempts = sum(each.attempts for each in standing.values())
    said = f"{len(passed)} of {len(LESSONS)} lessons pass, {attempts} attempts, {hints} hints"
    solutions = sum(each.solution for each in standing.values())
    return f"{said}, {solutions} solutions seen; about {left} minutes left"


def _read_standing(folder: Path) -> "tuple[dict[str, Standing], list[Lesson], int]":
    """Return the state of every lesson, the lessons that pass, and the minutes that the others take."""
    from llorch.apps.learn.lessons import LESSONS
    from llorch.apps.learn.progress import LearnerProgress

    progress = LearnerProgress(folder, say)
    standing = progress.read()
    passed = [lesson for lesson in LESSONS if progress.is_passed(lesson, standing[lesson.number])]
    return standing, passed, sum(lesson.minutes for lesson in LESSONS if lesson not in passed)


def _as_json(folder: Path) -> str:
    standing, passed, left = _read_standing(folder)
    lessons = {number: asdict(each) for number, each in standing.items()}
    values = {"passed": [lesson.number for lesson in passed], "minutes_left": left, "lessons": lessons}
    return to_json({"version": 1, **values}, indent=1)
