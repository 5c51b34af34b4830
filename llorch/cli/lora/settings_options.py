"""Options of `llorch lora train`, one per field of `llorch.training.settings`, and the settings that they set."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from llorch.cli.options import PATH, SEED, JsonObject, RealNumber, WholeNumber, group, page_option
from llorch.runtime.builtin import DATA, EVERY, is_builtin_name
from llorch.training.settings import TrainSettings
from llorch.training.settings_file import SHORT, read_settings, settings_from

config_option = page_option("--config", type=PATH, help="Settings file, .yaml or .toml; options win.")
_GROUPS: Mapping[str, tuple[str, ...]] = {  # headings of the help page
    "Data": (
        "valid", "max_length", "train_on", "parse_special", "packing", "template_date", "chat_template_kwargs",
    ),
    "Adapter": (
        "r", "alpha", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "rank_pattern",
        "alpha_pattern", "dropout", "rslora", "dora", "init",
    ),
    "Optimizer": (
        "lr", "lora_plus_ratio", "schedule", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm",
        "eight_bit", "label_smoothing",
    ),
    "Length and batches": ("epochs", "steps", "batch_size", "accumulation"),
    "Memory and numerics": ("chunk", "gradient_checkpointing", "dtype", "weights"),
    "Run": ("eval_every", "save_every", "keep", "seed", "tensorboard"),
    "Machine": ("device",),
}  # fmt: skip
_GROUP_BY_NAME = {name: title for title, names in _GROUPS.items() for name in names}
_NUMBERS: Mapping[object, click.ParamType] = {int: WholeNumber(), float: RealNumber()}
_FLAGS = {name: short for short, name in SHORT.items()}


class Pair(click.ParamType):
    """Parameter type `NAME=NUMBER`."""

    name = "name=number"

    def __init__(self, kind: click.ParamType) -> None:
        """Store the type of the number."""
        self._kind = kind

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Split at the last `=`; the name may be a pattern that contains one."""
        name, _, number = str(value).rpartition("=")
        try:
            if name:
                return name, self._kind.convert(number, None, None)
        except click.BadParameter:
            pass
        self.fail(f"expected NAME=NUMBER such as q_proj=8, got {value!r}", param, ctx)


def settings_options(*only: str) -> Callable[[Callable], Callable]:
    """Add an option for each setting, or for those in `only`; an absent option is None, so that a file can set it."""
    hints = get_type_hints(TrainSettings)

    def decorate(function: Callable) -> Callable:
        for field in reversed(fields(TrainSettings)):
            if "text" in field.metadata and field.name in (only or hints):
                function = group(_GROUP_BY_NAME[field.name], _option(field, hints[field.name]))(function)
        return function

    return decorate


def _option(field: Any, hint: Any) -> Callable[[Callable], Callable]:
    name = field.name
    flag = f"--{(_FLAGS.get(name) or name).replace('_', '-')}"
    text, allowed, kinds = field.metadata["text"], field.metadata["allowed"], get_args(hint) or (hint,)
    if name == "chat_template_kwargs":
        return page_option(flag, name, type=JsonObject(), help=text)
    if hint is bool:
        return page_option(f"{flag}/--no{flag[1:]}", name, default=None, help=text)
    if kinds[0] is str and len(kinds) == 2 and kinds[1] in (int, float):  # a mapping of names to numbers
        return page_option(flag, name, type=Pair(_NUMBERS[kinds[1]]), multiple=True, callback=_as_mapping, help=text)
    default_text = "" if field.default in (None, ()) else f"  [default: {field.default}]"
    choice = click.Choice([*allowed]) if allowed and not isinstance(allowed, str) else None
    number = SEED if name == "seed" else _NUMBERS.get(kinds[0])
    kind = choice or number or click.STRING
    return page_option(flag, name, type=kind, help=text + default_text)


def _as_mapping(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, Any], ...]
) -> dict[str, Any] | None:
    """Return the pairs as a mapping, or None without pairs."""
    if len(dict(pairs)) < len(pairs):
        raise click.BadParameter("expected each name once, got a name twice", ctx, param)
    return dict(pairs) or None


def chosen_settings(
    options: Mapping[str, Any], config: Path | None = None, *defaults: tuple[str, Mapping[str, Any]]
) -> TrainSettings:
    """Merge settings: the command line wins over the file, and the file over `defaults` (source, settings)."""
    sources = [*defaults] + ([(str(config), read_settings(config))] if config is not None else [])
    from llorch.cli.inputs import say_once

    settings = settings_from(*sources, ("command line", {name: v for name, v in options.items() if v is not None}))
    for name, names in ((settings.model, EVERY), (settings.data, DATA)):
        is_builtin_name(name, names, say_once)
    return settings
