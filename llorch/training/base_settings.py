"""Settings of a base that transformers trains with and llorch does not."""

from pathlib import Path
from typing import Any

from llorch.files import Weights
from llorch.files.strict_json import read_settings

_DROPOUT = "attention_dropout"  # the only dropout that the text models of transformers read, in all families of llorch


def text_settings(weights: Weights) -> dict[str, Any]:
    """Return the config.json of a base, of a multimodal model its text part; {} for a GGUF file, which has none."""
    whole = read_settings(Path(weights.path) / "config.json")
    text = whole.get("text_config")
    return text if isinstance(text, dict) else whole


def say_dropout(weights: Weights) -> str:
    """Name the dropout that config.json asks for and llorch does not train with; empty if it asks for none."""
    share = text_settings(weights).get(_DROPOUT)
    if not share:
        return ""
    return f"config.json has {_DROPOUT} {share}: transformers and PEFT train with this dropout, llorch trains without"
