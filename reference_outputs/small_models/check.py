"""Checks of a new model: an engine must read the same tokens and compute the same logits as the trained model."""

import itertools
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from small_models.corpus import stories
from small_models.shapes import Recipe

_TOLERANCE = 1e-5  # relative L2 distance of float32 logits over a few layers
_ODD_TEXTS = (
    " two  spaces",
    'Numbers 1234567, quotes "\'s" and\nlines\n\n',
    "\u00fcn\u00efcode \u4f60\u597d \U0001f642",
    "X",
)


def check(path: Path, model: transformers.PreTrainedModel, tokenizer: Tokenizer, recipe: Recipe) -> float:
    """Compare a file with the model and tokenizer it was written from.

    Args:
        path: The GGUF file.
        model: The model.
        tokenizer: The tokenizer.
        recipe: Gives the seed of the test text.

    Returns:
        The relative L2 distance between llama.cpp's logits and the model's.

    Raises:
        ValueError: Tokens differ, or the distance is above 1e-5.
    """
    engine = llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
        yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,  # the file's; by default this class sets 32 and 1
    )  # fmt: skip
    return _compared(
        path, model, tokenizer, recipe,
        encode=lambda text: engine.tokenize(text.encode(), add_bos=True, special=False),
        run=lambda ids: _logits(engine, ids),
    )  # fmt: skip


def check_folder(path: Path, model: transformers.PreTrainedModel, tokenizer: Tokenizer, recipe: Recipe) -> float:
    """Check a folder, which transformers reads, as `check` does a file."""
    reloaded = type(model).from_pretrained(path).eval()
    loaded_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return _compared(
        path, model, tokenizer, recipe,
        encode=lambda text: loaded_tokenizer(text)["input_ids"],
        run=lambda ids: _logits_of(reloaded, ids),
    )  # fmt: skip


def _compared(
    path: Path, model: transformers.PreTrainedModel, tokenizer: Tokenizer, recipe: Recipe, *,
    encode: Callable[[str], list[int]], run: Callable[[list[int]], np.ndarray],
) -> float:  # fmt: skip
    texts = list(itertools.islice(stories(recipe.seed + 1000), 50))
    for text in [*texts, *_ODD_TEXTS]:
        expected, actual = tokenizer.encode(text).ids, encode(text)
        if expected != actual:
            raise ValueError(f"{path.name}: {text!r} is {expected} here and {actual} in the engine")
    ids = tokenizer.encode(texts[0]).ids[:64]
    expected, actual = _logits_of(model, ids), run(ids)
    distance = float(np.linalg.norm(expected - actual) / np.linalg.norm(expected))
    if not distance < _TOLERANCE:
        raise ValueError(f"{path.name}: the engine's logits lie {distance:.1e} away, expected under {_TOLERANCE}")
    return distance


def _logits(engine: llama_cpp.Llama, ids: list[int]) -> np.ndarray:
    engine.eval(ids)
    return np.array(engine.scores[: len(ids)], np.float64)


def _logits_of(model: transformers.PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()
