"""`llorch lora eval`: what an adapter changes on data that it was not trained on."""

from pathlib import Path
from typing import Any

import click

from llorch.cli.lora.options import any_base_option
from llorch.cli.options import json_option, threads_option, verb
from llorch.cli.output import progress, say, to_json


@verb(
    "Compute loss and perplexity with and without an adapter.",
    "llorch lora eval story path/to/my-adapter --data pirate",
    "llorch lora eval story path/to/my-adapter --data pirate --split valid --json",
    "llorch lora eval path/to/model path/to/adapter --data path/to/chats.jsonl --device cuda --chunk 2048",
)
@click.argument("model")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option("--data", required=True, help="JSONL file, .json list, folder with train.jsonl, or the built-in pirate.")
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]),
    help="Which part of the data.  [default: test, else valid, else train]",
)  # fmt: skip
@click.option("--valid", default=0.0, show_default=True, help="Hold out this share of the rows, as training did.")
@click.option("--batch-size", default=8, show_default=True, help="Rows of one forward pass.")
@click.option("--max-length", type=int, help="Tokens of a row.  [default: the model's context, at most 1024]")
@click.option(
    "--train-on", type=click.Choice(["assistant", "last", "all"]), default="assistant", show_default=True,
    help="Judged of a chat: every turn of the assistant, its last one, all tokens.",
)  # fmt: skip
@click.option("--chunk", default=256, show_default=True, help="Tokens whose logits exist at once; 0: all of a pass.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float64"]),
    help="Of weights and activations.  [default: float32 on the CPU, bfloat16 on CUDA]",
)  # fmt: skip
@click.option(
    "--weights", type=click.Choice(["decoded", "packed"]), default="decoded", show_default=True,
    help="packed: keep quantised matrices as they are in the file.",
)  # fmt: skip
@any_base_option
@threads_option
@json_option(
    "One object: base, split, n_rows, n_trained, loss, perplexity, each of these two without and with_adapter."
)
def command(*, adapter: Path, split: str | None, any_base: bool, as_json: bool, **given: Any) -> None:
    """Judge ADAPTER, a PEFT directory or a LoRA GGUF file, on MODEL.

    The loss is the mean over all tokens that are to be learned, in nats; perplexity is its exponential.
    """
    from llorch.cli.lora.options import require_torch, threads_for_training

    require_torch()
    from llorch.pytorch.train.judging import judge_adapter
    from llorch.train.settings import TrainSettings

    settings = TrainSettings(**given)
    say(threads_for_training(settings))
    with progress("judging the adapter"):
        found = judge_adapter(settings, adapter, split=split, any_base=any_base)
    losses = dict(zip(("without", "with_adapter"), (found.without, found.with_adapter), strict=True))
    perplexities = dict(zip(("without", "with_adapter"), found.perplexities, strict=True))
    if as_json:
        names = ("base", "split", "n_rows", "n_trained")
        values = {name: getattr(found, name) for name in names}
        click.echo(to_json({**values, "loss": losses, "perplexity": perplexities}))
        return
    say(found.base)
    click.echo(f"{found.split}: {found.n_rows} rows, {found.n_trained:,} tokens judged")
    for name in losses:
        click.echo(f"{name.replace('_', ' '):<13} loss {losses[name]:.4f}   perplexity {perplexities[name]:.4g}")
