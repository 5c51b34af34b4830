"""Groups of verbs whose modules are imported when one is used."""

from importlib import import_module
from typing import ClassVar

import click

from llorch.cli.help_pages import HelpContext
from llorch.errors import suggestion


class Verbs(click.Group):
    """A group; the module `<package>.<verb>`, with `_` for `-`, holds the `command` of each verb."""

    verbs: ClassVar[tuple[str, ...]]
    package: ClassVar[str]
    context_class = HelpContext

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
