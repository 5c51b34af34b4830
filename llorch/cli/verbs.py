"""Groups of verbs whose modules are imported when one is used."""

from importlib import import_module
from typing import ClassVar

import click


class Verbs(click.Group):
    """A group; the module `<package>.<verb>`, with `_` for `-`, holds the `command` of each verb.

    Attributes:
        verbs: Their names, in the order of the help page.
        package: Where their modules are.
    """

    verbs: ClassVar[tuple[str, ...]]
    package: ClassVar[str]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the verbs in the order of the help page."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name not in self.verbs:
            return None
        return import_module(f"{self.package}.{cmd_name.replace('-', '_')}").command
