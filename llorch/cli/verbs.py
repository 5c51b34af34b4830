"""Groups of verbs whose modules are imported when one is used, and their help pages, whose words stay whole.

`textwrap` breaks `--any-base` and `all-linear` after the hyphen.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import click

from llorch.errors import suggestion

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
    """A command with such a page; `foreign` says what to use instead of options that other programs have."""

    context_class = HelpContext

    def __init__(self, *args: Any, foreign: Mapping[str, str] = {}, **settings: Any) -> None:
        """Remember foreign options by name, `_` for `-`."""
        super().__init__(*args, **settings)
        self.foreign = foreign

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; a foreign option is refused with what to use instead."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            advice = self.foreign.get(error.option_name.lstrip("-").replace("-", "_"))
            if advice is None:
                raise
            raise click.UsageError(f"no option {error.option_name}: {advice}", ctx) from None


class Verbs(click.Group):
    """A group; the module `<package>.<verb>`, with `_` for `-`, holds the `command` of each verb."""

    context_class = HelpContext

    def __init__(self, *args: Any, package: str, verbs: tuple[str, ...], **settings: Any) -> None:
        """Remember where modules are, and the verbs in the order of the help page."""
        super().__init__(*args, **settings)
        self.package, self.verbs = package, verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the verbs in the order of the help page."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name not in self.verbs:
            return None
        return import_module(f"{self.package}.{cmd_name.replace('-', '_')}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that the first argument names; for another word say which one it is like."""
        word = args[0]
        if word not in self.verbs and not word.startswith("-"):
            ctx.fail(f"there is no verb {word!r}{suggestion(word, self._names(ctx))}")
        return super().resolve_command(ctx, args)

    def _names(self, ctx: click.Context) -> list[str]:
        """The verbs of groups, then every verb."""
        groups = [(verb, getattr(self.get_command(ctx, verb), "verbs", ())) for verb in self.verbs]
        return [f"{group} {verb}" for group, verbs in groups for verb in verbs] + list(self.verbs)
