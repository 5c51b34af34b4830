"""`llorch lora eval`: measure the effect of an adapter on data that it was not trained on."""

from pathlib import Path
from typing import Any

import click

from llorch.cli.lora.options import any_base_option
from llorch.cli.lora.settings_options import chosen_settings, settings_options
from llorch.cli.options import MODEL, PATH, group, json_option, page_option, verb
from llorch.cli.output import progress, say, to_json
from llorch.cli.threads import threads_option


@verb(
    "Compute loss and perplexity with and without an adapter.",
    "llorch lora eval story path/to/my-adapter --data pirate",
    "llorch lora eval story path/to/my-adapter --data pirate --split valid --json",
    "llorch lora eval path/to/model path/to/adapter --data chats.jsonl",
    page="lora.md",
)
@click.argument("model", type=MODEL)
@click.argument("adapter", type=PATH)
@group(
    "Data",
    page_option(
        "--data", required=True, help="JSONL file, .json list, folder or pirate."
    ),
    page_option(
        "--split", type=click.Choice(["train", "valid", "test"]),
        help="Part of the data.  [default: test, else valid, else train]",
    ),
)  # fmt: skip
@settings_options(
    "valid", "batch_size", "max_length", "train_on", "template_date", "chat_template_kwargs", "chunk", "device",
    "dtype", "weights",
)  # fmt: skip
@any_base_option
@threads_option
@json_option(
    "One object: base, split, n_rows, n_trained, loss, perplexity, the last two each without and with_adapter."
)
def command(*, adapter: Path, split: str | None, any_base: bool, as_json: bool, **setting_values: Any) -> None:
    """Compute the loss and perplexity of MODEL on data, with and without ADAPTER.

    ADAPTER is a PEFT directory or a LoRA GGUF file. The loss is the mean over all learned tokens, in nats; perplexity
    is its exponential.
    """
    from llorch.cli.lora.options import require_torch, threads_for_training

    require_torch()
    from llorch.pytorch.train.trainer import judge_adapter

    settings = chosen_settings(setting_values)
    say(threads_for_training(settings))
    with progress("judging the adapter"):
        evaluation = judge_adapter(settings, adapter, split=split, any_base=any_base)
    losses = dict(zip(("without", "with_adapter"), (evaluation.without, evaluation.with_adapter), strict=True))
    perplexities = dict(zip(("without", "with_adapter"), evaluation.perplexities, strict=True))
    if as_json:
        names = ("base", "split", "n_rows", "n_trained")
        values = {name: getattr(evaluation, name) for name in names}
        click.echo(to_json({**values, "loss": losses, "perplexity": perplexities}))
        return
    say(evaluation.base)
    click.echo(f"{evaluation.split}: {evaluation.n_rows} rows, {evaluation.n_trained:,} tokens judged")
    for name in losses:
        click.echo(f"{name.replace('_', ' '):<13} loss {losses[name]:.4f}   perplexity {perplexities[name]:.4g}")
