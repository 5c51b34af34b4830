"""The options of `llorch lora train`, one per field of the settings; defaults and names are read from there."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args

import click

from llorch.train.schedules import SCHEDULES
from llorch.train.settings import DTYPES, INITS, RESIDENCIES, TrainOn, TrainSettings
from llorch.train.settings_file import SHORT

_SHORT = {name: short for short, name in SHORT.items()}


class Pair(click.ParamType):
    """`NAME=NUMBER`."""

    name = "name=number"

    def __init__(self, kind: type[int] | type[float]) -> None:
        """Remember which numbers are meant."""
        self._kind = kind

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Split at the last sign; the name may be a pattern."""
        name, _, number = str(value).rpartition("=")
        try:
            if name:
                return name, self._kind(number)
        except ValueError:
            pass
        self.fail(f"expected NAME=NUMBER such as q_proj=8, got {value!r}", param, ctx)


_HELP: Mapping[str, tuple[Any, str]] = {
    "valid": (float, "Share of the rows that is held out for validation, where there is no valid.jsonl."),
    "r": (int, "Rank of the adapter."),
    "alpha": (float, "Its product is scaled by alpha / r."),
    "target_modules": (str, "Which matrices: q_proj,v_proj, a regular expression for module paths, or all-linear."),
    "exclude_modules": (str, "Likewise, of what is left out again."),
    "layers_to_transform": (str, "Only these layers, such as 0,4-7."),
    "rank_pattern": (Pair(int), "NAME=8: a rank of its own for the modules whose path ends so; repeatable."),
    "alpha_pattern": (Pair(float), "NAME=16: likewise for alpha."),
    "dropout": (float, "Share of the adapter's input that is dropped."),
    "rslora": (bool, "Scale by alpha / sqrt(r)."),
    "dora": (bool, "Learn the length of every row apart from its direction."),
    "init": (click.Choice(INITS), "First values of the adapter."),
    "lr": (float, "Peak learning rate.  [default: 2e-4 * 4096 / hidden_size]"),
    "lora_plus_ratio": (float, "Learning rate of lora_B over that of lora_A."),
    "schedule": (click.Choice(list(SCHEDULES)), "Of the learning rate, after the warm-up."),
    "warmup_steps": (int, "Optimizer steps of linear warm-up."),
    "warmup_ratio": (float, "The same as a share of all steps.  [default: 0.05]"),
    "weight_decay": (float, "Decoupled, as in AdamW."),
    "max_grad_norm": (float, "Scale gradients down to this norm; 0: never."),
    "eight_bit": (bool, "Keep Adam's moments in blocks of 8 bits."),
    "epochs": (int, "Passes over the training set."),
    "steps": (int, "Optimizer steps, instead of --epochs."),
    "batch_size": (int, "Rows of one forward pass."),
    "accumulation": (int, "Forward passes of one optimizer step."),
    "max_length": (int, "Tokens of a row.  [default: the model's context, at most 1024]"),
    "train_on": (
        click.Choice(get_args(TrainOn)),
        "Learned of a chat: every turn of the assistant, its last one, all tokens.",
    ),
    "parse_special": (bool, "In plain text, the text of a control token is that token."),
    "packing": (bool, "Put several documents into a row; they do not see each other."),
    "label_smoothing": (float, "Share of the target that goes to all tokens alike."),
    "chunk": (int, "Tokens whose logits exist at the same time; 0: all of a forward pass."),
    "gradient_checkpointing": (bool, "Compute activations twice instead of keeping them; same bits."),
    "dtype": (click.Choice(DTYPES), "Of weights and activations.  [default: float32 on the CPU, bfloat16 on CUDA]"),
    "device": (str, "cpu, cuda or cuda:N."),
    "weights": (click.Choice(RESIDENCIES), "packed: keep quantised matrices as they are in the file."),
    "eval_every": (int, "Steps between validations; 0: the first and the last only."),
    "save_every": (int, "Steps between snapshots; 0: the last only."),
    "keep": (int, "Snapshots that are kept."),
    "seed": (int, "Of the adapter, of dropout and of the order of the data."),
    "tensorboard": (bool, "Write events for TensorBoard, too."),
}


def settings_options(function: Callable) -> Callable:
    """Add an option per setting; one that is not given is None, so that a config file can say it."""
    for field in reversed([field for field in fields(TrainSettings) if field.name in _HELP]):
        kind, text = _HELP[field.name]
        flag = f"--{_SHORT.get(field.name, field.name).replace('_', '-')}"
        if kind is bool:
            option = click.option(f"{flag}/--no{flag[1:]}", field.name, default=None, help=text)
        elif isinstance(kind, Pair):
            option = click.option(flag, field.name, type=kind, multiple=True, callback=_as_mapping, help=text)
        else:
            shown = "" if field.default in (None, ()) else f"  [default: {field.default}]"
            option = click.option(flag, field.name, type=kind, help=text + shown)
        function = option(function)
    return function


def _as_mapping(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, Any], ...]
) -> dict[str, Any] | None:
    """What was given, or None."""
    if len(dict(pairs)) < len(pairs):
        raise click.BadParameter("a name is given twice", ctx, param)
    return dict(pairs) or None
