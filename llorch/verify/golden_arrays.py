"""A file of arrays of goldens: safetensors, compressed by xz, as cases and engines nearly repeat each other.

`xz --decompress --keep truth.safetensors.xz` leaves the safetensors file, every stage in it under its own name.
"""

import lzma
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llorch.files.new_file import new_file

SUFFIX = ".safetensors.xz"
# `lp` and `pb`: what a byte is like depends on its place in a number, and numbers of 8 bytes lie at multiples of 8.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23, "lc": 1, "lp": 3, "pb": 3}]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name; what was there stays until all is written."""
    from safetensors.numpy import save

    in_c_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # else written as it lies
    with new_file(path) as file:
        file.write_bytes(lzma.compress(save(in_c_order), filters=_FILTERS))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote.

    Args:
        path: Ends in `SUFFIX`.

    Returns:
        Arrays by name, in the order of their names.

    Raises:
        ValueError: The file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(sorted(load(lzma.decompress(path.read_bytes())).items()))  # which come in no order
    except (lzma.LZMAError, SafetensorError) as error:
        raise ValueError(f"golden {path}: damaged: {error}; run reference_outputs/regenerate.py") from None
