"""A tensor as its file stores it: bytes, type and shape, decoded when it is wanted and only as far as it is wanted."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llorch.errors import FormatError
from llorch.files.quant import GGMLType, decode, decode_into, has_bad_scale

TILE = 1 << 20  # elements decoded in one go: large enough for a fast product, small beside a model
_SCAN = 1 << 18  # elements looked at in one go: the mask stays in the processor cache


@dataclass(frozen=True)
class Packed:
    """A tensor as its file stores it."""

    name: str
    path: Path
    raw: np.ndarray  # uint8
    ggml_type: GGMLType
    shape: tuple[int, ...]

    @property
    def by_row(self) -> np.ndarray:
        """The bytes of a matrix, one row per row; a vector is one row."""
        return self.raw.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1)

    def decode(self) -> np.ndarray:
        """The whole tensor as float32."""
        return decode(self.raw, self.ggml_type, self.shape)

    def decode_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Some rows of `by_row` as float32."""
        return decode(rows, self.ggml_type, (len(rows), *self.shape[1:]))

    @property
    def rows_at_once(self) -> int:
        """Rows of a tile."""
        return min(self.shape[0], max(1, TILE // math.prod(self.shape[1:])))

    def tiles(self) -> Iterator[tuple[int, np.ndarray]]:
        """First row and decoded rows of one piece of a matrix after the other; the next piece overwrites the last."""
        step = self.rows_at_once
        room = np.empty((step, *self.shape[1:]), np.float32)
        for start in range(0, self.shape[0], step):
            tile = room[: self.shape[0] - start]
            decode_into(self.by_row[start : start + step], self.ggml_type, tile)
            yield start, tile

    def require_scales(self) -> None:
        """Refuse (NonFinite, with the place) a block scale that means NaN and yet decodes to a finite number."""
        if has_bad_scale(self.raw, self.ggml_type):
            row = next(row for row, blocks in enumerate(self.by_row) if has_bad_scale(blocks, self.ggml_type))
            raise FormatError("NonFinite", f"{self.name} has a NaN block scale in row {row}", path=self.path)

    def require_finite(self, start: int, rows: np.ndarray) -> None:
        """Refuse decoded rows from number `start` on, see `require_finite`."""
        require_finite(rows, self.name, self.path, first_row=start)


def require_finite(array: np.ndarray, name: str, path: Path, *, first_row: int = 0) -> None:
    """Refuse (NonFinite, with the place) an array, or rows of one from a number on, with NaN or infinity."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _SCAN):
        finite = np.isfinite(flat[start : start + _SCAN])
        if not finite.all():
            first = start + int(np.argmin(finite))
            row, *rest = (int(axis) for axis in np.unravel_index(first, array.shape))
            raise FormatError("NonFinite", f"{name} has {flat[first]} at {(first_row + row, *rest)}", path=path)
