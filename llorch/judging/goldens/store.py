"""The store of goldens: a folder with a record in JSON, and files of arrays, for every kind of golden.

A file of arrays is safetensors, compressed by xz, because cases and engines nearly repeat each other.
`xz --decompress --keep truth.safetensors.xz` leaves the safetensors file, every stage in it under its own name.
"""

import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llorch.files.new_file import new_file
from llorch.runtime.builtin import missing_golden
from llorch.runtime.errors import UserError
from llorch.stages.comparison import Difference

SUFFIX = ".safetensors.xz"
# `lp` and `pb`: what a byte is like depends on its place in a number, and numbers of 8 bytes lie at multiples of 8.
Arrays = Mapping[str, np.ndarray]
Distances = Mapping[str, Mapping[str, Mapping[str, Difference]]]  # engine -> case -> stage key -> distance
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23, "lc": 1, "lp": 3, "pb": 3}]


@dataclass(frozen=True)
class GoldenStore:
    """Goldens of one kind in the folder of a model.

    Attributes:
        folder: The folder.
        name: Name of the record.
    """

    folder: Path
    name: str = "golden.json"

    @property
    def path(self) -> Path:
        """Path of the record."""
        return self.folder / self.name

    def write(self, record: Mapping[str, object], files: Mapping[str, Arrays], *, indent: int | None = 1) -> None:
        """Write the record and the files of arrays, by name without `SUFFIX`; the same content gives the same bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, arrays in files.items():
            write_arrays(self.folder / f"{name}{SUFFIX}", arrays)
        with new_file(self.path) as file:
            file.write_bytes((json.dumps(record, indent=indent, sort_keys=True) + "\n").encode())

    def record(self) -> dict[str, Any]:
        """Read the record. FileNotFoundError if it is missing: a missing golden is a failure, never a pass."""
        return json.loads(_there(self.path).read_text(encoding="utf-8"))

    def arrays(self, names: Iterable[str]) -> dict[str, dict[str, np.ndarray]]:
        """Read files of arrays by name. FileNotFoundError if one is missing."""
        paths = {name: _there(self.folder / f"{name}{SUFFIX}") for name in names}
        return {name: read_arrays(path) for name, path in paths.items()}


def refused(where: object, message: str) -> UserError:
    """Make the error for goldens that cannot be used."""
    return UserError(f"golden {where}: {message}; run reference_outputs/regenerate.py")


def _there(path: Path) -> Path:
    if not path.is_file():
        raise missing_golden(path)
    return path


def plain_distances(distances: Distances) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Convert distances to JSON: error and worst element, with four digits; more would be noise."""
    return {
        engine: {
            case: {key: [float(f"{n:.3e}") for n in (d.error, d.worst)] for key, d in found.items()}
            for case, found in cases.items()
        }
        for engine, cases in distances.items()
    }


def read_distances(plain: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Distances:
    """Invert `plain_distances`."""
    return {
        engine: {
            case: {key: Difference(error, worst) for key, (error, worst) in found.items()}
            for case, found in cases.items()
        }
        for engine, cases in plain.items()
    }


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name; what was there stays until all is written."""
    from safetensors.numpy import save

    in_c_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # else written as it lies
    with new_file(path) as file:
        file.write_bytes(lzma.compress(save(in_c_order), filters=_FILTERS))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote, in the order of the names; ValueError if the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(sorted(load(lzma.decompress(path.read_bytes())).items()))  # which come in no order
    except (lzma.LZMAError, SafetensorError) as error:
        raise refused(path, f"damaged: {error}") from None
