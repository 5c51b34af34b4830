"""Checkpoint 00: the tensors of a file as our reader sees them, against a reader that someone else wrote.

The other side is the `gguf` package's GGUFReader for a GGUF file (name, type, shape and hash of the bytes) and the
`safetensors` package for a Hugging Face folder (name, type and shape; transformers then loads the values itself).
"""

import hashlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from llorch.files import Weights, open_weights
from llorch.files.gguf import GGUFFile

Table = Mapping[str, str]  # tensor name -> "dtype shape [sha256]"


def own_tensors(weights: Weights) -> Table:
    """The tensor table by our reader, in the file's own names and shapes.

    Args:
        weights: An opened model.

    Returns:
        Name to entry.
    """
    source = weights.source
    if isinstance(source, GGUFFile):
        tensors = source.tensors.items()
        return {name: _entry(info.ggml_type.name, info.shape, source.raw(name)) for name, info in tensors}
    return {name: _entry(info.dtype, info.shape) for name, info in source.tensors.items()}


def fingerprint(path: Path) -> str:
    """Hash of the names, types, shapes and bytes of all tensors; the rest of the file is free.

    Args:
        path: A GGUF file.

    Returns:
        Hexadecimal digits.
    """
    weights = open_weights(path)
    with closing(weights.source):
        table = sorted(own_tensors(weights).items())
    return hashlib.sha256(repr(table).encode()).hexdigest()


def foreign_tensors(path: Path) -> Table:
    """The same table by the other reader.

    Args:
        path: A GGUF file or a Hugging Face folder.

    Returns:
        Name to entry.
    """
    return _by_safetensors(path) if path.is_dir() else _by_gguf(path)


def differing(own: Table, foreign: Table) -> list[str]:
    """Names of tensors that are missing on one side or not the same on both."""
    return sorted(name for name in own.keys() | foreign.keys() if own.get(name) != foreign.get(name))


def _by_gguf(path: Path) -> Table:
    from gguf import GGUFReader

    return {
        t.name: _entry(t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data)
        for t in GGUFReader(path).tensors
    }


def _by_safetensors(folder: Path) -> Table:
    from safetensors import safe_open

    table: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                table[name] = _entry(part.get_dtype(), tuple(part.get_shape()))
    return table


def _entry(dtype: str, shape: tuple[int, ...], data: np.ndarray | None = None) -> str:
    table_entry = f"{dtype} {'x'.join(map(str, shape))}"
    if data is None:
        return table_entry
    return f"{table_entry} {hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()}"
