"""Tables on stdout."""

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH = 1000  # of any table
MIN_WIDTH = 200  # of a table that goes to a file or a pipe, which have no width of their own


class Stdout(Console):
    """Rich's console, except that a reader who goes away is reported like any error."""

    def on_broken_pipe(self) -> None:
        """Pass the BrokenPipeError on; rich would end the process with the exit code of differing numbers."""
        raise  # (rich calls this while it handles the error)


def console() -> Console:
    """Open stdout without line breaks of rich; NO_COLOR and FORCE_COLOR are obeyed."""
    out = Stdout(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not sys.stdout.isatty() and out.width < MIN_WIDTH:
        out.width = MIN_WIDTH
    return out


def table(*columns: str) -> Table:
    """Make an empty table without lines; a heading that begins with `>` is aligned to the right."""
    empty = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        empty.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=True)
    return empty


def print_table(out: Console, rows: Table) -> None:
    """Print a table whole: on a narrow terminal its lines run over, no column is cut or left out."""
    width = out.width
    out.width = max(width, Measurement.get(out, out.options.update_width(MAX_WIDTH), rows).maximum)
    try:
        out.print(rows, soft_wrap=False)
    finally:
        out.width = width
