"""Texts that the built-in model `story` can read, and damaged or changed copies of it."""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llorch.files.gguf import open_gguf
from llorch.runtime.builtin import builtin_path

CORPUS = Path(__file__).parents[3] / "reference_outputs"


def tale(monkeypatch: pytest.MonkeyPatch, count: int) -> str:
    """Stories of the kind that the model was trained on, one per line; the seed is not the one of its training."""
    monkeypatch.syspath_prepend(str(CORPUS))
    return "\n".join(itertools.islice(importlib.import_module("small_models.corpus").stories(5), count))


def with_tensors(path: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """A copy of `story` with other numbers, in place."""
    data = bytearray(builtin_path("story").read_bytes())
    for name, info in open_gguf(builtin_path("story")).tensors.items():
        place = slice(info.offset, info.offset + info.n_bytes)
        old = np.frombuffer(data[place], np.float32).reshape(info.shape)
        data[place] = np.ascontiguousarray(change(name, old), np.float32).tobytes()
    path.write_bytes(data)
    return path


def rounded(path: Path) -> Path:
    """A copy of `story` whose matrices keep few bits: like a quantised file, but in float32."""

    def change(name: str, old: np.ndarray) -> np.ndarray:
        step = np.abs(old).max() / 16
        return np.rint(old / step) * step if old.ndim == 2 else old

    return with_tensors(path, change)


def with_swapped_words(path: Path, first: bytes, second: bytes) -> Path:
    """A copy of `story` in which two words of equal length have each other's token ids."""
    data = builtin_path("story").read_bytes()
    words = [len(word).to_bytes(8, "little") + word for word in (first, second)]
    places = [data.index(word) for word in words]
    swapped = bytearray(data)
    for place, word in zip(places, reversed(words), strict=True):
        swapped[place : place + len(word)] = word
    path.write_bytes(swapped)
    return path


def with_context(path: Path, n_tokens: int) -> Path:
    """A copy of `story` that says it holds so many tokens."""
    data = builtin_path("story").read_bytes()
    key = b"llama.context_length"
    place = data.index(key) + len(key) + 4  # behind the type of the value
    path.write_bytes(data[:place] + n_tokens.to_bytes(4, "little") + data[place + 4 :])
    return path
