"""`llorch learn list`: list every lesson and its state."""

from pathlib import Path

from llorch.cli.learn.folder import impl_option, learners_folder
from llorch.cli.options import verb
from llorch.cli.output import say


@verb(
    "List the lessons and their verdicts.",
    "llorch learn list",
    "llorch learn list --impl my_llama",
    "LLORCH_IMPL=my_llama llorch learn list",
)
@impl_option
def command(*, impl: str | None) -> None:
    """List every lesson, block by block, with its minutes, its last verdict and the hints taken.

    CHANGED marks a lesson whose files changed after it passed; check it again.
    """
    show_list(learners_folder(impl))


def show_list(folder: Path) -> None:
    """Print a table of the lessons, with their state in a folder."""
    from rich.text import Text

    from llorch.apps.learn.lessons import BLOCKS
    from llorch.apps.learn.progress import LearnerProgress
    from llorch.cli.learn.shown import coloured
    from llorch.cli.tables import console, print_table, table

    progress = LearnerProgress(folder, say)
    states = progress.read()
    rows = table("no", "lesson", ">minutes", "verdict", ">attempts", ">hints", "")
    for title, lessons in BLOCKS.items():
        rows.add_row("", Text(title, "bold"))
        for lesson in lessons:
            state = states[lesson.number]
            numbers = (str(count or "") for count in (state.attempts, sum(state.hints.values())))
            verdict, solution = coloured(progress.label(lesson, state)), "solution seen" if state.solution else ""
            rows.add_row(lesson.number, lesson.name, str(lesson.minutes), verdict, *numbers, solution)
    print_table(console(), rows)
