"""`llorch learn museum`: bugs that people had, as exercises."""

from pathlib import Path

import click

from llorch.cli.options import WholeNumber
from llorch.cli.outcome import DIFFERS

number_argument = click.argument("number", type=WholeNumber())


@click.group(
    invoke_without_command=True,
    short_help="Bugs that people had, as exercises.",
    help="""\b
llorch learn museum                     the list
llorch learn museum open 3 bug3         its dump and what was reported
llorch learn museum answer 3 "no bias"  is that it?
llorch learn museum solution 3          the cause, the thread, the fix

Bugs that people had in engines of Llama and Qwen: the numbers come in, the cause goes out.""",
)
@click.pass_context
def command(context: click.Context) -> None:
    """List them, where no verb stands."""
    from llorch.learn.museum.exhibit import exhibits

    if context.invoked_subcommand is None:
        for shown in exhibits():
            click.echo(f"{shown.number:>3}  {shown.symptom}")


@command.command("open")
@number_argument
@click.argument("folder", type=click.Path(path_type=Path))
def open_one(number: int, folder: Path) -> None:
    """Write the dump of NUMBER and a README into FOLDER."""
    from llorch.learn.museum.exhibit import exhibit, write

    shown = exhibit(number)
    write(shown, folder)
    click.echo(f"{shown.symptom}\n{folder / 'README.md'} has the rest; a dump of {shown.model} lies beside it.")


@command.command("answer")
@number_argument
@click.argument("words", nargs=-1, required=True)
def answer(number: int, words: tuple[str, ...]) -> None:
    """Say whether WORDS are the cause of NUMBER: a mistake, a value, a stage; exit code 1 where they are not."""
    from llorch.learn.museum.answers import judged
    from llorch.learn.museum.exhibit import exhibit

    found = judged(exhibit(number), " ".join(words))
    click.echo(found.said)
    click.get_current_context().exit(0 if found.is_right else DIFFERS)


@command.command("solution")
@number_argument
def show_solution(number: int) -> None:
    """What NUMBER was, and how it was mended."""
    from llorch.learn.museum.answers import solution
    from llorch.learn.museum.exhibit import exhibit

    click.echo(solution(exhibit(number)))
