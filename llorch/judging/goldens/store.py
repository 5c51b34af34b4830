"""Storage of all goldens (arrays of reference engines): a folder with a JSON record and files of arrays.

A file of arrays is safetensors, compressed by xz, because cases and engines have nearly equal numbers. To read one in
another program, run `xz --decompress --keep truth.safetensors.xz`; the safetensors file names every stage.
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
# lp=3 and pb=3: the byte statistics depend on the offset modulo 8, because float64 values are aligned to 8 bytes.
Arrays = Mapping[str, np.ndarray]
Distances = Mapping[str, Mapping[str, Mapping[str, Difference]]]  # engine -> case -> stage key -> distance
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23, "lc": 1, "lp": 3, "pb": 3}]


@dataclass(frozen=True)
class GoldenStore:
    """Goldens of one kind in the folder of a model.

    Attributes:
        folder: Path of the folder.
        name: File name of the record.
    """

    folder: Path
    name: str = "golden.json"

    @property
    def path(self) -> Path:
        """Path of the record."""
        return self.folder / self.name

    def write(self, record: Mapping[str, object], files: Mapping[str, Arrays], *, indent: int | None = 1) -> None:
        """Write the record and the files of arrays, by name without `SUFFIX`; equal contents give equal bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, arrays in files.items():
            write_arrays(self.folder / f"{name}{SUFFIX}", arrays)
        with new_file(self.path) as file:
            file.write_bytes((json.dumps(record, indent=indent, sort_keys=True) + "\n").encode())

    def record(self) -> dict[str, Any]:
        """Read the record; raise FileNotFoundError if it is missing: a missing golden is a failure, never a pass."""
        return json.loads(_require_file(self.path).read_text(encoding="utf-8"))

    def arrays(self, names: Iterable[str]) -> dict[str, dict[str, np.ndarray]]:
        """Read files of arrays by name; raise FileNotFoundError if a file is missing."""
        paths = {name: _require_file(self.folder / f"{name}{SUFFIX}") for name in names}
        return {name: read_arrays(path) for name, path in paths.items()}


def golden_error(source: object, message: str) -> UserError:
    """Create the error for goldens that cannot be used."""
    return UserError(f"golden {source}: {message}; run reference_outputs/regenerate.py")


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise missing_golden(path)
    return path


def write_distances(distances: Distances) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Convert distances to JSON: `error` and `worst`, rounded to four digits, because more would be noise."""
    return {
        engine: {
            case: {key: [float(f"{number:.3e}") for number in (d.error, d.worst)] for key, d in stages.items()}
            for case, stages in cases.items()
        }
        for engine, cases in distances.items()
    }


def read_distances(record: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Distances:
    """Convert the JSON of `write_distances` back to distances."""
    return {
        engine: {
            case: {key: Difference(error, worst) for key, (error, worst) in stages.items()}
            for case, stages in cases.items()
        }
        for engine, cases in record.items()
    }


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name; replace an existing file only after all arrays are written."""
    from safetensors.numpy import save

    in_c_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # `save` ignores strides
    with new_file(path) as file:
        file.write_bytes(lzma.compress(save(in_c_order), filters=_FILTERS))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays that `write_arrays` wrote, sorted by name; raise UserError if the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(sorted(load(lzma.decompress(path.read_bytes())).items()))  # `load` has no fixed order
    except (lzma.LZMAError, SafetensorError) as error:
        raise golden_error(path, f"damaged: {error}") from None
