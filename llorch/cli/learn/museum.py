"""`llorch learn museum`: real bugs of other engines, as exercises."""

from pathlib import Path

import click

from llorch.cli.options import PATH, WholeNumber
from llorch.cli.outcome import DIFFERS
from llorch.cli.verbs import Verb, VerbGroup

number_argument = click.argument("number", type=WholeNumber())


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    short_help="Find the cause of real bugs in other engines.",
    examples=(
        "llorch learn museum                    # lists the bugs",
        "llorch learn museum open 3 bug3",
        'llorch learn museum answer 3 "no bias"',
    ),
)
@click.pass_context
def command(context: click.Context) -> None:
    """List real bugs in engines of Llama and Qwen, as exercises: find the cause from the numbers."""
    from llorch.apps.learn.museum import exhibits

    if context.invoked_subcommand is None:
        for bug in exhibits():
            click.echo(f"{bug.number:>3}  {bug.symptom}")


@command.command(
    "open", cls=Verb, short_help="Write the dump of a bug and its report.",
    examples=("llorch learn museum open 3 bug3",),
)  # fmt: skip
@number_argument
@click.argument("folder", type=PATH)
def open_one(number: int, folder: Path) -> None:
    """Write the dump of bug NUMBER and a README with its report into FOLDER."""
    from llorch.apps.learn.museum import exhibit, write

    bug = exhibit(number)
    write(bug, folder)
    click.echo(
        f"{bug.symptom}\n{folder / 'README.md'} has the full report; the same folder holds the dump of {bug.model}."
    )


@command.command(
    "answer", cls=Verb, short_help="Check your answer.",
    examples=('llorch learn museum answer 3 "no bias"',),
)  # fmt: skip
@number_argument
@click.argument("words", nargs=-1, required=True)
def answer(number: int, words: tuple[str, ...]) -> None:
    """Check WORDS as the cause of bug NUMBER: a mistake, a value or a stage.

    Exit codes: 0 WORDS are the cause, 1 they are not.
    """
    from llorch.apps.learn.museum import compare, exhibit

    answer_check = compare(exhibit(number), " ".join(words))
    click.echo(answer_check.said)
    click.get_current_context().exit(0 if answer_check.is_right else DIFFERS)


@command.command(
    "solution", cls=Verb, short_help="Show the cause and the fix.",
    examples=("llorch learn museum solution 3",),
)  # fmt: skip
@number_argument
def show_solution(number: int) -> None:
    """Show the cause of bug NUMBER, the thread that reported it, and the fix."""
    from llorch.apps.learn.museum import exhibit, solution

    click.echo(solution(exhibit(number)))
