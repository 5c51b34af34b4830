"""`llorch lora`: train an adapter, look at it, merge it, hand it on."""

from llorch.cli.verbs import Verbs

HELP = """\b
llorch lora train story --data path/to/data -o my-adapter
llorch lora eval story my-adapter --data path/to/data
llorch lora merge story my-adapter merged.gguf

Train LoRA adapters, prove that a run can be resumed bit by bit, and carry them to PEFT and llama.cpp.
"""

command = Verbs(
    package="llorch.cli.lora", verbs=("train", "eval", "merge", "export", "inspect", "doctor", "verify-resume"),
    help=HELP, short_help="Train, merge and hand on LoRA adapters.",
)  # fmt: skip
