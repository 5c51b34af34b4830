"""`llorch lora`: train an adapter, look at it, merge it, hand it on."""

import click

from llorch.cli.verbs import Verbs

HELP = """\b
llorch lora train story --data path/to/data -o my-adapter
llorch lora eval story my-adapter --data path/to/data
llorch lora merge story my-adapter merged.gguf

Train LoRA adapters, prove that a run can be resumed bit by bit, and carry them to PEFT and llama.cpp.
"""


class Lora(Verbs):
    """The verbs of `llorch lora`."""

    verbs = ("train", "eval", "merge", "export", "inspect", "doctor", "verify-resume")
    package = "llorch.cli.lora"


@click.group(cls=Lora, help=HELP, short_help="Train, merge and hand on LoRA adapters.")
def command() -> None:
    """Only verbs do something."""
