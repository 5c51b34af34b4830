"""Print verdicts on stdout, in colour on a terminal."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from llorch.cli.tables import console
from llorch.stages.comparison import FAIL, NOT_RUN, PASS

if TYPE_CHECKING:
    from llorch.apps.learn.sandbox import Outcome

STYLES = {PASS: "bold green", FAIL: "bold red", "BORROWED": "yellow", NOT_RUN: "magenta", "CHANGED": "yellow"}


def coloured(text: str) -> Text:
    """Colour the labels of verdicts."""
    styled = Text(text)
    for label, style in STYLES.items():
        styled.highlight_words([label], style)
    return styled


def print_outcome(outcome: "Outcome", *, full: bool = False, out: Console | None = None) -> None:
    """Print the verdict of a lesson; `full` adds the whole traceback of an exception."""
    heading, *details = outcome.text.split("\n")
    (out or console()).print(coloured(heading), *map(Text, details), sep="\n")
    if full and outcome.traceback:
        (out or console()).print(Text(outcome.traceback))


def counted(outcomes: "Iterable[Outcome]") -> str:
    """Count outcomes by label: `2 PASS, 1 FAIL`."""
    counts = Counter(outcome.label for outcome in outcomes)
    return ", ".join(f"{counts[label]} {label}" for label in STYLES if counts[label])


def exit_code(outcomes: "Sequence[Outcome]", *, strict: bool) -> int:
    """Return 1 if a lesson failed, 3 if one did not run and `strict` is on, else 0."""
    labels = {outcome.label for outcome in outcomes}
    return 1 if FAIL in labels else 3 if strict and NOT_RUN in labels else 0
