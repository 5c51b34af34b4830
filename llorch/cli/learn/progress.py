"""`llorch learn progress`: summarise the learner's progress."""

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
    click.echo(_as_json(folder) if as_json else format_progress(folder))


def format_progress(folder: Path) -> str:
    """Format the state of all lessons in a folder as one line."""
    from llorch.apps.learn.lessons import LESSONS

    states, passed, minutes_left = _read_standing(folder)
    hints = sum(sum(state.hints.values()) for state in states.values())
    attempts = sum(state.attempts for state in states.values())
    counts = f"{len(passed)} of {len(LESSONS)} lessons pass, {attempts} attempts, {hints} hints"
    solutions = sum(state.solution for state in states.values())
    return f"{counts}, {solutions} solutions seen; about {minutes_left} minutes left"


def _read_standing(folder: Path) -> "tuple[dict[str, Standing], list[Lesson], int]":
    """Return the state of every lesson, the lessons that pass, and the minutes that the others take."""
    from llorch.apps.learn.lessons import LESSONS
    from llorch.apps.learn.progress import LearnerProgress

    progress = LearnerProgress(folder, say)
    states = progress.read()
    passed = [lesson for lesson in LESSONS if progress.is_passed(lesson, states[lesson.number])]
    return states, passed, sum(lesson.minutes for lesson in LESSONS if lesson not in passed)


def _as_json(folder: Path) -> str:
    states, passed, minutes_left = _read_standing(folder)
    lessons = {number: asdict(state) for number, state in states.items()}
    values = {"passed": [lesson.number for lesson in passed], "minutes_left": minutes_left, "lessons": lessons}
    return to_json({"version": 1, **values}, indent=1)
