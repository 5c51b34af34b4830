"""Tables on stdout."""

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH = 1000  # columns of the widest table
MIN_WIDTH = 200  # columns for a file or a pipe, which have no width


class Stdout(Console):
    """Rich console that raises BrokenPipeError like any other error."""

    def on_broken_pipe(self) -> None:
        """Pass the BrokenPipeError on; rich would end the process with the exit code of differing numbers."""
        raise  # rich calls this in its `except` block


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
        is_right = column.startswith(">")
        empty.add_column(column.removeprefix(">"), justify="right" if is_right else "left", no_wrap=True)
    return empty


def print_table(out: Console, rows: Table) -> None:
    """Print a table without cutting columns: on a narrow terminal its lines run over."""
    width = out.width
    out.width = max(width, Measurement.get(out, out.options.update_width(MAX_WIDTH), rows).maximum)
    try:
        out.print(rows, soft_wrap=False)
    finally:
        out.width = width
