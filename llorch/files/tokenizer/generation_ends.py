"""The tokens at which `generate` of transformers stops, and those that a model was taught to end with.

llorch and llama.cpp know the end of a turn by its text, such as `<|im_end|>`. transformers knows only the ids that
`generation_config.json` names, or where that file is absent those of `config.json`.

Source: transformers 5.23 generation/configuration_utils.py (`from_model_config`) and generation/utils.py
(`_prepare_special_tokens`).
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from llorch.files.strict_json import read_settings
from llorch.files.tokenizer.chat_templates import read_templates
from llorch.files.tokenizer.conversation import Chats
from llorch.files.tokenizer.tokenizer import Tokenizer
from llorch.runtime.errors import FormatError

GENERATION = "generation_config.json"


def unnamed_ends(written: Collection[int], folder: str | Path) -> list[int]:
    """Sort out the ids at which transformers would not stop; a GGUF file has none, its readers know ends by text."""
    return sorted({*written} - {*_ends_of_config(Path(folder))}) if Path(folder).is_dir() else []


def chat_ends(folder: Path) -> frozenset[int]:
    """Find what the chat template of a folder ends a turn with; nothing where there is no template that can be read."""
    try:
        tokenizer = Tokenizer.from_huggingface(folder)
        return Chats(lambda: read_templates(folder), tokenizer, path=folder).end_ids
    except (FormatError, FileNotFoundError):
        return frozenset()


def with_ends(folder: Path, more: Collection[int]) -> dict[str, object]:
    """Make the values of a `generation_config.json` that ends at more ids than that of a folder."""
    values = _text_settings(folder)
    if not (folder / GENERATION).exists():
        values = {key: values[key] for key in ("bos_token_id", "pad_token_id") if values.get(key) is not None}
    return {**values, "eos_token_id": [*_ends_of_config(folder), *more]}


def _ends_of_config(folder: Path) -> list[int]:
    """Read the end tokens that the config.json of a folder names."""
    value = _text_settings(folder).get("eos_token_id")
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]


def _text_settings(folder: Path) -> Mapping[str, object]:
    """Return the folder's generation settings, else its configuration with the text part's keys."""
    if (folder / GENERATION).exists():
        return read_settings(folder / GENERATION)
    values = read_settings(folder / "config.json")
    text = values.get("text_config")
    return {**text, **values} if isinstance(text, dict) else values
