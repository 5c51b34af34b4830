"""`llorch learn check`: lessons, once."""

from collections.abc import Sequence

import click

from llorch.cli.learn.folder import chosen_lessons, impl_option, learners_folder
from llorch.cli.options import json_option, verb
from llorch.cli.output import say, to_json


@verb(
    "Check lessons, once.",
    "llorch learn check",
    "llorch learn check 01b",
    "llorch learn check --chain --strict --json",
)
@click.argument("lessons", nargs=-1)
@click.option("--chain", is_flag=True, help="Run all that is written up to the lesson on its own results.")
@impl_option
@click.option("--strict", is_flag=True, help="Exit code 3 where something could not be run.")
@click.option("--full", is_flag=True, help="Show the whole traceback of what your code raises.")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
    help="That your code may take for a lesson.",
)  # fmt: skip
@json_option("One object: version, impl, mode, and for each lesson the verdict and what stands in it.")
def command(
    *, lessons: Sequence[str], chain: bool, impl: str | None, strict: bool, full: bool, seconds: float, as_json: bool
) -> None:
    """Check LESSONS, by number or name; all of them if none is named.

    Your code runs in a process of its own. What it prints goes to stderr.
    """
    from llorch.cli.learn.shown import counted, exit_code, print_outcome
    from llorch.learn.apart import outcomes
    from llorch.learn.progress import Progress

    folder, numbers = learners_folder(impl), [lesson.number for lesson in chosen_lessons(lessons)]
    mode, found, progress = "chained" if chain else "isolated", [], Progress(folder, say)
    for outcome in outcomes(folder, numbers, mode, seconds=seconds, say=say):
        found.append(outcome)
        if not chain:
            progress.note(outcome)
        if not as_json:
            print_outcome(outcome, full=full)
    if as_json:
        listed = [outcome.record for outcome in found]
        click.echo(to_json({"version": 1, "impl": str(folder), "mode": mode, "lessons": listed}, indent=1))
    elif len(found) > 1:
        click.echo(counted(found))
    click.get_current_context().exit(exit_code(found, strict=strict))
