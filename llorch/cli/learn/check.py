"""`llorch learn check`: lessons, once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from llorch.cli.learn.folder import chosen_lessons, full_option, impl_option, learners_source, seconds_option
from llorch.cli.options import json_option, verb
from llorch.cli.output import say, to_json


@verb(
    "Check lessons, once.",
    "llorch learn check",
    "llorch learn check 01b",
    "llorch learn check 01b --teeth",
    "llorch learn check --chain --strict --json",
    "llorch learn check 01b --answers answers.npz",
)
@click.argument("lessons", nargs=-1)
@click.option("--chain", is_flag=True, help="Run all that is written up to the lesson on its own results.")
@impl_option
@click.option("--teeth", is_flag=True, help="Also plant the known mistakes in what passes, and see them fail.")
@click.option(
    "--answers",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Instead of code: what it made of the file of llorch learn inputs, for one lesson.",
)
@click.option("--strict", is_flag=True, help="Exit code 3 where something could not be run.")
@full_option
@seconds_option
@json_option("One object: version, impl, mode, and for each lesson the verdict and what stands in it.")
def command(
    *, lessons: Sequence[str], chain: bool, impl: str | None, answers: Path | None, strict: bool, full: bool,
    as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Check LESSONS, by number or name; all of them if none is named.

    Your code runs in a process of its own. What it prints goes to stderr.
    """
    from llorch.cli.learn.shown import counted, exit_code, print_outcome
    from llorch.learn.apart import outcomes
    from llorch.learn.progress import Progress

    if answers is not None:
        _judge_answers(lessons, answers, full=full, strict=strict, as_json=as_json, alone=not (chain or impl))
    source, numbers = learners_source(impl), [lesson.number for lesson in chosen_lessons(lessons)]
    mode, found, progress = "chained" if chain else "isolated", [], Progress(Path(source), say)
    for outcome in outcomes(source, numbers, mode, say=say, **how):
        found.append(outcome)
        if mode == "isolated" and progress.folder.is_dir():
            progress.note(outcome)
        if not as_json:
            print_outcome(outcome, full=full)
    if as_json:
        listed = [outcome.record for outcome in found]
        click.echo(to_json({"version": 1, "impl": source, "mode": mode, "lessons": listed}, indent=1))
    elif len(found) > 1:
        click.echo(counted(found))
    click.get_current_context().exit(exit_code(found, strict=strict))


def _judge_answers(
    lessons: Sequence[str], answers: Path, *, full: bool, strict: bool, as_json: bool, alone: bool
) -> NoReturn:
    from llorch.cli.learn.shown import exit_code, print_outcome
    from llorch.learn.answers import answered
    from llorch.learn.apart import outcome_of
    from llorch.learn.check import check

    if len(lessons) != 1 or not alone:
        raise click.UsageError("--answers goes with one lesson, without --chain and --impl")
    (lesson,) = chosen_lessons(lessons)
    found = outcome_of(lesson.number, check(lesson, answered(lesson, answers)))
    if as_json:
        record = {"version": 1, "impl": str(answers), "mode": "isolated", "lessons": [found.record]}
        click.echo(to_json(record, indent=1))
    else:
        print_outcome(found, full=full)
    click.get_current_context().exit(exit_code([found], strict=strict))
