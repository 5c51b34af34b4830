"""The tokens that training data ends with, and those of them at which transformers would not stop."""

from collections.abc import Collection

from llorch.files.tokenizer.generation_ends import unnamed_ends
from llorch.model.model import OpenModel
from llorch.runtime.errors import FormatError
from llorch.training.batch import Examples


def trained_ends(examples: Examples, model: OpenModel) -> list[int]:
    """Find the end tokens that examples teach; FormatError where the model has no vocabulary."""
    ends = model.tokenizer.eos_token_ids
    try:
        ends |= model.chats.end_ids
    except FormatError:
        pass  # its chat template cannot be read, so no conversation was learned
    return examples.trained_among(ends)


def say_unnamed(ends: Collection[int], model: OpenModel) -> str:
    """Say where `generate` of transformers goes on although a text ends; nothing where it stops."""
    missing = unnamed_ends(ends, model.weights.path)
    if not missing:
        return ""
    texts = ", ".join(f"{model.tokenizer.decode([one], skip_special=False)} ({one})" for one in missing)
    return (
        f"transformers' generate() does not stop at {texts}, which the base's generation_config.json does not name;"
        " llorch lora merge writes the name; without a merge pass eos_token_id to generate()"
    )
