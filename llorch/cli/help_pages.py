"""Help pages whose words stay whole: `textwrap` breaks `--any-base` and `all-linear` after the hyphen."""

from collections.abc import Iterable

import click

_STANDS_FOR_HYPHEN = "\u2011"  # while lines are broken; of the same width


class WholeWords(click.HelpFormatter):
    """Breaks lines at spaces only."""

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", _STANDS_FOR_HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options and what they mean."""
        super().write_dl([(name, text.replace("-", _STANDS_FOR_HYPHEN)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        """The page."""
        return super().getvalue().replace(_STANDS_FOR_HYPHEN, "-")


class HelpContext(click.Context):
    """A context whose help page has whole words."""

    formatter_class = WholeWords


class Verb(click.Command):
    """A command with such a page."""

    context_class = HelpContext
