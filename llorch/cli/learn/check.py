"""`llorch learn check`: check lessons once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from llorch.cli.learn.folder import chosen_lessons, full_option, impl_option, learners_source, seconds_option
from llorch.cli.options import group, json_option, page_option, verb
from llorch.cli.output import say, to_json


@verb(
    "Check lessons once.",
    "llorch learn check 01b",
    "llorch learn check 01b --teeth",
    "llorch learn check --chain --strict --json",
)
@click.argument("lessons", nargs=-1)
@impl_option
@group(
    "Input",
    page_option(
        "--answers", type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="Answers of your program to the file of llorch learn inputs, for one lesson.",
    ),
)  # fmt: skip
@group(
    "Check",
    page_option("--chain", is_flag=True, help="Run of all written functions, each on your earlier results."),
    page_option(
        "--teeth",
        "with_faults",
        is_flag=True,
        help="Injection of the known mistakes into passing code; each must fail.",
    ),
    page_option("--strict", is_flag=True, help="Exit code 3 if something could not run."),
    seconds_option,
)
@full_option
@json_option("One object: version, impl, mode, and for each lesson its verdict and details.")
def command(
    *, lessons: Sequence[str], chain: bool, impl: str | None, answers: Path | None, strict: bool, full: bool,
    as_json: bool, **check_options: Any,
) -> None:  # fmt: skip
    """Check LESSONS, by number or name; without LESSONS, check all.

    Your code runs in its own process. The text that it prints goes to stderr.
    """
    from llorch.apps.learn.progress import LearnerProgress
    from llorch.apps.learn.sandbox import outcomes
    from llorch.cli.learn.shown import counted, exit_code, print_outcome

    if answers is not None:
        _judge_answers(lessons, answers, full=full, strict=strict, as_json=as_json, is_only_option=not (chain or impl))
    source, numbers = learners_source(impl), [lesson.number for lesson in chosen_lessons(lessons)]
    mode, lesson_outcomes, progress = "chained" if chain else "isolated", [], LearnerProgress(Path(source), say)
    for outcome in outcomes(source, numbers, mode, progress=say, **check_options):
        lesson_outcomes.append(outcome)
        if mode == "isolated" and progress.folder.is_dir():
            progress.note(outcome)
        if not as_json:
            print_outcome(outcome, full=full)
    if as_json:
        records = [outcome.record for outcome in lesson_outcomes]
        click.echo(to_json({"version": 2, "impl": source, "mode": mode, "lessons": records}, indent=1))
    elif len(lesson_outcomes) > 1:
        click.echo(counted(lesson_outcomes))
    click.get_current_context().exit(exit_code(lesson_outcomes, strict=strict))


def _judge_answers(
    lessons: Sequence[str], answers: Path, *, full: bool, strict: bool, as_json: bool, is_only_option: bool
) -> NoReturn:
    from llorch.apps.learn.answers import answered
    from llorch.apps.learn.check import check
    from llorch.apps.learn.sandbox import outcome_of
    from llorch.cli.learn.shown import exit_code, print_outcome

    if len(lessons) != 1 or not is_only_option:
        raise click.UsageError("--answers goes with one lesson, without --chain and --impl")
    (lesson,) = chosen_lessons(lessons)
    outcome = outcome_of(lesson.number, check(lesson, answered(lesson, answers)))
    if as_json:
        record = {"version": 2, "impl": str(answers), "mode": "isolated", "lessons": [outcome.record]}
        click.echo(to_json(record, indent=1))
    else:
        print_outcome(outcome, full=full)
    click.get_current_context().exit(exit_code([outcome], strict=strict))
