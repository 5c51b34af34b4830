"""Options and parameter types that several verbs share; heavy modules are not imported here."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from glob import glob
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from llorch.cli.verbs import Verb, page_option
from llorch.runtime.builtin import EVERY
from llorch.runtime.errors import decode_utf8

ENGINES = ("llamacpp", "transformers")
PATH, FILE = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)
MOST = 2**31 - 1  # largest number of an option: libraries hold counts in 32 bits


class WholeNumber(click.IntRange):
    """Integer in a range; click reports other text as no valid "integer range", which explains nothing."""

    name = "integer"

    def __init__(self, min: int | None = None, max: int = MOST) -> None:
        """Take an integer from `min` to `max`."""
        super().__init__(min, max)


class RealNumber(click.FloatRange):
    """Finite number in a range; click's type accepts nan and inf."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value}", param, ctx)
        return number


SECONDS = RealNumber(min=0, min_open=True, max=1e6)  # a time limit; some waits hold milliseconds in 32 bits
SEED = WholeNumber(max=2**63 - 1)  # the largest that torch accepts


class UnicodeText(click.ParamType):
    """Text for a model; Python passes bytes of an argument that are not UTF-8 as surrogates."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Decode the bytes of the argument as UTF-8, whatever the locale is."""
        if not isinstance(value, str):
            return value
        argument_name = "text" if param is None or ctx is None else param.get_error_hint(ctx).replace("'", "")
        return decode_utf8(os.fsencode(value), argument_name)


TEXT = UnicodeText()


class TokenIds(click.ParamType):
    """Token ids, `1,2,3`."""

    name = "1,2,3"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Parse the list; the model checks later if an id is in its vocabulary."""
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        for position, part in enumerate(parts, start=1):
            if re.fullmatch("[0-9]{1,9}", part) is None:
                self.fail(f"expected token ids such as 1,2,3, got {part!r} (entry {position})", param, ctx)
        return [int(part) for part in parts]


class ModelSpec(click.ParamType):
    """MODEL argument; `llorch.cli.inputs.model_path` finds the file or folder."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of built-in models and of models in this folder; otherwise complete files."""
        local_models = sorted([*glob("*.gguf"), *map(os.path.dirname, glob("*/config.json"))])
        names = [name for name in (*EVERY, *local_models) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


MODEL = ModelSpec()


def verb(
    summary: str, *examples: str, page: str = "", foreign: Mapping[str, str] = {}, common: Collection[str] = ()
) -> Callable[[Callable], click.Command]:
    """Make a command with a help page; see `Page` and `Verb` for `page`, `common` and `foreign`.

    The help page of the group shows the summary, that of the command its docstring.
    """
    return click.command(cls=Verb, short_help=summary, examples=examples, page=page, foreign=foreign, common=common)


def group(title: str, *options: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    """Put options below the heading `title` on a help page, in this order; "" keeps the heading of each."""

    def decorate(function: Callable) -> Callable:
        n_params = len(getattr(function, "__click_params__", ()))
        decorated = reduce(lambda decorated, option: option(decorated), reversed(options), function)
        for param in vars(decorated)["__click_params__"][n_params:]:
            param.group = title or param.group
        return decorated

    return decorate


def tokens_option(text: str) -> Callable[[Callable], Callable]:
    """Add the option `--tokens 1,2,3`, for models without a vocabulary."""
    return group("Input", page_option("--tokens", type=TokenIds(), help=text))


def json_option(text: str) -> Callable[[Callable], Callable]:
    """Make the option `--json` with a help text."""
    return group("Output", page_option("--json", "as_json", is_flag=True, help=text))


class JsonObject(click.ParamType):
    """A JSON object, such as `{"enable_thinking": false}`."""

    name = "json"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Parse the text."""
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"expected a JSON object, got {value!r}: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"expected a JSON object, got {value!r}", param, ctx)
        return parsed


def refuse_both(prompt: str | None, tokens: list[int] | None) -> None:
    """Raise a usage error when both text and ids are given."""
    if prompt is not None and tokens is not None:
        raise click.UsageError("give a prompt or --tokens, not both")
