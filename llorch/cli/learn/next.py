"""`llorch learn next`: show the next step, on the short route and then on the path."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llorch.cli.learn.folder import impl_option, learners_folder, near
from llorch.cli.options import verb
from llorch.cli.output import say

if TYPE_CHECKING:
    from llorch.apps.learn.lessons import Lesson, Step

MUSEUM = "real bugs of other engines, as exercises: llorch learn museum"


@verb(
    "Show which lesson comes next.",
    "llorch learn next",
    "llorch learn next --impl my_llama",
    "LLORCH_IMPL=my_llama llorch learn next",
)
@impl_option
def command(*, impl: str | None) -> None:
    """Show the next step: of the route of 90 minutes, then of all lessons; its page and the file to write."""
    folder = learners_folder(impl)
    show_step(folder, next_step(folder))


def next_step(folder: Path, after: "Step | None" = None) -> "Step | None":
    """Find the first step that is not done: one that follows the step `after`, or if there is none, any."""
    from llorch.apps.learn.lessons import STEPS

    todo = _steps_to_do(folder)
    later = todo if after is None else [step for step in todo if STEPS.index(step) > STEPS.index(after)]
    return next(iter(later or todo), None)


def step_of(folder: Path, lesson: "Lesson") -> "Step":
    """Return the first step of a lesson that is not done, else its last step."""
    from llorch.apps.learn.lessons import STEPS

    steps = [step for step in STEPS if step.lesson == lesson]
    return next((step for step in _steps_to_do(folder) if step in steps), steps[-1])


def _steps_to_do(folder: Path) -> "list[Step]":
    from llorch.apps.learn.lessons import STEPS
    from llorch.apps.learn.progress import LearnerProgress

    progress = LearnerProgress(folder, say)
    states = progress.read()
    return [step for step in STEPS if not progress.is_done(step, states[step.lesson.number])]


def show_step(folder: Path, step: "Step | None") -> None:
    """Print what precedes a step, its title, and the commands and files for it."""
    if step is None:
        click.echo("every lesson passes; to record this, run: llorch learn certificate")
        click.echo(MUSEUM)
        return
    for line in _lines_before(folder, step):
        click.echo(line)
    click.echo(f"{step.lesson.number} {step.lesson.name}, {step.minutes} min: {describe_work(step)}")
    click.echo(f"  read   llorch learn open {step.lesson.number}")
    if step.parts:
        click.echo(f"  write  {near(folder / f'{step.lesson.module}.py')}")
        click.echo(f"  check  llorch learn check {step.lesson.number}")


def describe_work(step: "Step") -> str:
    """Name the functions to write, or say that there is only a page to read."""
    return ", ".join(exercise.name for exercise in step.parts) or "read the page"


def _lines_before(folder: Path, step: "Step") -> Sequence[str]:
    """Say where a step stands: on the route, after it, at the start of a block, or among the optional lessons."""
    from llorch.apps.learn.lessons import BLOCKS, OPTIONAL, PATH, ROUTE

    if step in ROUTE:
        minutes = sum(step.minutes for step in ROUTE)
        return [f"step {ROUTE.index(step) + 1} of {len(ROUTE)} on the route of {minutes} minutes"]
    passed = _passed_lessons(folder)
    if step.lesson.number in OPTIONAL:
        return ["every other lesson passes; this one is optional"]
    lines = []
    if passed <= {route_step.lesson for route_step in ROUTE}:
        lines.append(f'the route is done; hear your code: llorch run story "Once upon a time" --impl {near(folder)}')
    titles = [title for title, lessons in BLOCKS.items() if step.lesson == lessons[0]]
    if titles and step != PATH[0]:
        lines += [f"a block is complete; {MUSEUM}", *_offer_optional_blocks(titles[0])]
    return lines


def _offer_optional_blocks(title: str) -> Sequence[str]:
    """List the optional blocks that stand directly before a block."""
    from llorch.apps.learn.lessons import BLOCKS, OPTIONAL

    before = [*BLOCKS.items()][: [*BLOCKS].index(title)]
    offered = [*takewhile(lambda block: block[1][0].number in OPTIONAL, reversed(before))]
    names = [f"{title}: {', '.join(lesson.number for lesson in lessons)}" for title, lessons in reversed(offered)]
    return [f"before you go on, if you like: {'; '.join(names)}"] if names else []


def _passed_lessons(folder: Path) -> "set[Lesson]":
    from llorch.apps.learn.lessons import LESSONS
    from llorch.apps.learn.progress import LearnerProgress

    progress = LearnerProgress(folder, say)
    states = progress.read()
    return {lesson for lesson in LESSONS if progress.is_passed(lesson, states[lesson.number])}
