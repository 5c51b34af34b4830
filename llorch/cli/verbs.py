"""Groups of verbs (commands) whose modules are imported when one is used, and their help pages.

A help page has a sentence, at most three examples, the file that explains more, and options below headings. Words are
not broken: `textwrap` would break `--any-base` and `all-linear` after the hyphen.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import click

from llorch.runtime.errors import suggestion

PAGES = "checkpoints/commands/"
_STANDS_FOR_HYPHEN = "\u2011"  # replaces "-" while click wraps lines; it has the same width
_NAMES_WIDTH = 27  # columns for the names of options; a longer name has a line of its own
HELP_ALL = "llorch.cli.help-all"  # in a context's meta: its help page lists every option
_LARGEST_SHOWN = 1000  # a range with a larger upper end is left out: few users reach it


class WholeWords(click.HelpFormatter):
    """Help formatter that breaks lines at spaces only."""

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", _STANDS_FOR_HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options and what they mean."""
        super().write_dl([(name, text.replace("-", _STANDS_FOR_HYPHEN)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        """Return the page."""
        return super().getvalue().replace(_STANDS_FOR_HYPHEN, "-")


class HelpContext(click.Context):
    """Context whose help pages break lines at spaces only."""

    formatter_class = WholeWords


class Option(click.Option):
    """Option with a heading on the help page, set by `llorch.cli.options.group`."""

    group = ""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Write `--[no-]name` for a pair of flags."""
        record = super().get_help_record(ctx)
        return record and (re.sub(r"--(\S+) / --no-\1", r"--[no-]\1", record[0]), record[1])

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Leave out a range without an upper end, or with a large one."""
        extra = super().get_help_extra(ctx)
        maximum = getattr(self.type, "max", None)
        if maximum is None or maximum > _LARGEST_SHOWN:
            extra.pop("range", None)
        return extra


page_option = partial(click.option, cls=Option)


def _print_all_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the help page with every option, and exit."""
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL_OPTION = Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all_help,
    help="Show every option and exit.",
)  # fmt: skip
_HELP_ALL_OPTION.group = "Output"


class Page(click.Command):
    """Command with a help page of this form."""

    context_class = HelpContext

    def __init__(
        self, *args: Any, examples: Iterable[str] = (), page: str = "", common: Collection[str] = (), **settings: Any
    ) -> None:
        """Store the examples, the file below `PAGES` that explains more, and names of the options that --help shows.

        Without `common`, --help shows all options; else --help-all shows the others.
        """
        super().__init__(*args, **settings)
        self.examples, self.page = tuple(examples), page and PAGES + page
        self.rare: list[click.Parameter] = []
        if common:  # click's `hidden` would also take the others from completion
            self.rare = [param for param in self.params if isinstance(param, Option) and param.name not in common]
            self.params.append(_HELP_ALL_OPTION)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sentence, the examples and the page that explains more."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        if self.page:
            formatter.write(f"\nMore: {self.page}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group; groups stand in the order of their first options, --help at the end."""
        groups: dict[str, list[tuple[str, str]]] = {}
        title, rare = "Options", [] if HELP_ALL in ctx.meta else self.rare
        for param in self.get_params(ctx):
            is_shown = isinstance(param, click.Option) and param not in rare
            if is_shown and (record := param.get_help_record(ctx)) is not None:
                title = getattr(param, "group", "") or [*groups, title][-1]
                groups.setdefault(title, []).append(record)
        names = [name for rows in groups.values() for name, _ in rows]
        width = min(_NAMES_WIDTH, max(map(len, names), default=0))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=_NAMES_WIDTH)
        if rare:
            formatter.write(f"\n{len(rare)} more options: {ctx.command_path} --help-all\n")


class Verb(Page):
    """Command that explains what replaces an option of another program; `foreign` has the advice by option name."""

    def __init__(self, *args: Any, foreign: Mapping[str, str] = {}, **settings: Any) -> None:
        """Store the advice on foreign options by their names, with `_` for `-`."""
        super().__init__(*args, **settings)
        self.foreign = foreign

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; a foreign option raises UsageError with the advice."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            advice = self.foreign.get(error.option_name.lstrip("-").replace("-", "_"))
            if advice is None:
                raise
            raise click.UsageError(f"no option {error.option_name}: {advice}", ctx) from None


class VerbGroup(Page, click.Group):
    """Group of commands with a help page of this form."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


class Verbs(VerbGroup):
    """Group of verbs; the module `<package>.<verb>`, with `_` for `-`, holds the `command` of each verb."""

    def __init__(self, *args: Any, package: str, verbs: Mapping[str, tuple[str, ...]], **settings: Any) -> None:
        """Store the package of the verbs' modules, and the verbs by heading of the help page."""
        super().__init__(*args, **settings)
        self.package, self.headings = package, verbs
        self.verbs = tuple(name for names in verbs.values() for name in names)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the verbs in the order of the help page."""
        return list(self.verbs)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs below their headings."""
        width = max(map(len, self.verbs))
        for heading, names in self.headings.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), verb.short_help or "") for name, verb in commands if verb])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name not in self.verbs:
            return None
        return import_module(f"{self.package}.{cmd_name.replace('-', '_')}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that the first argument names; for an unknown word suggest a similar verb."""
        word = args[0]
        if word not in self.verbs and not word.startswith("-"):
            ctx.fail(f"there is no verb {word!r}{suggestion(word, self._names(ctx))}")
        return super().resolve_command(ctx, args)

    def _names(self, ctx: click.Context) -> list[str]:
        """List the verbs of groups, then every verb."""
        groups = [(verb, getattr(self.get_command(ctx, verb), "verbs", ())) for verb in self.verbs]
        return [f"{group} {verb}" for group, verbs in groups for verb in verbs] + list(self.verbs)
