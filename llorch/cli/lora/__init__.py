"""`llorch lora`: train, inspect, merge and export an adapter."""

from llorch.cli.verbs import Verbs

command = Verbs(
    package="llorch.cli.lora",
    verbs={
        "Train": ("train", "eval"),
        "Pass on": ("merge", "export"),
        "Check": ("inspect", "doctor", "verify-resume"),
    },
    help="Train LoRA adapters, check them, and convert them for PEFT and llama.cpp.",
    short_help="Train, check, merge and export LoRA adapters.",
    examples=(
        "llorch lora train story --data path/to/data -o my-adapter",
        "llorch lora eval story my-adapter --data path/to/data",
        "llorch lora merge story my-adapter merged.gguf",
    ),
)  # fmt: skip
