"""Tables on stdout."""

import sys

from rich.console import Console
from rich.table import Table

MIN_WIDTH = 200  # of a table that goes to a file or a pipe, which have no width of their own


class Stdout(Console):
    """Rich's console, except that a reader who goes away is reported like any error."""

    def on_broken_pipe(self) -> None:
        """Pass the BrokenPipeError on; rich would end the process with the exit code of differing numbers."""
        raise  # (rich calls this while it handles the error)


def console() -> Console:
    """Stdout; rich obeys NO_COLOR and FORCE_COLOR."""
    out = Stdout(markup=False, highlight=False, emoji=False)
    if not sys.stdout.isatty() and out.width < MIN_WIDTH:
        out.width = MIN_WIDTH
    return out


def table(*columns: str) -> Table:
    """An empty table without lines.

    Args:
        columns: Headings; one that begins with `>` is aligned to the right.

    Returns:
        The table.
    """
    empty = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        empty.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=True)
    return empty
