"""A tensor as its file stores it: bytes, type and shape, decoded when it is wanted and only as far as it is wanted."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llorch.files.quant import BLOCK_SIZES, GGMLType, decode, decode_into, has_bad_scale
from llorch.runtime.errors import FormatError

TILE = 1 << 20  # elements decoded in one go: large enough for a fast product, small beside a model
_SCAN = 1 << 18  # elements looked at in one go: the mask stays in the processor cache

Rows = slice | np.ndarray


@dataclass(frozen=True, slots=True)
class Scheme:
    """The type of a matrix in a quantised Hugging Face folder, in place of a ggml type."""

    name: str  # for people: method, bits, and columns of one scale


StoredType = GGMLType | Scheme


def has_codes(kind: StoredType) -> bool:
    """Tell if a type stores codes with scales, so that it cannot hold every float."""
    return not isinstance(kind, GGMLType) or BLOCK_SIZES[kind][0] > 1


@dataclass(frozen=True)
class Packed:
    """A tensor as its file stores it; `Rows` of a matrix are a slice or numbers of rows."""

    name: str
    path: Path
    raw: np.ndarray  # uint8
    ggml_type: StoredType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes that the tensor takes in its file."""
        return self.raw.size

    @property
    def by_row(self) -> np.ndarray:
        """The bytes of a matrix, one row per row; a vector is one row."""
        return self.raw.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1)

    def decode(self) -> np.ndarray:
        """Decode the whole tensor to float32."""
        return decode(self.raw, self.ggml, self.shape)

    def decode_rows(self, rows: Rows) -> np.ndarray:
        """Decode some rows of a matrix to float32."""
        part = self.by_row[rows]
        return decode(part, self.ggml, (len(part), *self.shape[1:]))

    def decode_rows_into(self, rows: slice, out: np.ndarray) -> None:
        """Write some rows of a matrix into a contiguous float32 array."""
        decode_into(self.by_row[rows], self.ggml, out)

    def picked(self, rows: Rows) -> "Packed":
        """Return the matrix of some rows, still as stored; a view for a slice."""
        part = self.by_row[rows]
        return replace(self, raw=part.reshape(-1), shape=(len(part), *self.shape[1:]))

    def holds_the_same(self, other: "Packed") -> bool:
        """Tell if the numbers of both are equal; equal bytes are not decoded."""
        same_bytes = self.ggml_type is other.ggml_type and np.array_equal(self.raw, other.raw)
        return same_bytes or np.array_equal(self.decode(), other.decode())

    @property
    def rows_at_once(self) -> int:
        """Number of rows that are decoded together."""
        return min(self.shape[0], max(1, TILE // math.prod(self.shape[1:])))

    def tiles(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row and the rows of each piece of a matrix; the next piece overwrites the last."""
        step = self.rows_at_once
        room = np.empty((step, *self.shape[1:]), np.float32)
        for start in range(0, self.shape[0], step):
            tile = room[: self.shape[0] - start]
            self.decode_rows_into(slice(start, start + step), tile)
            yield start, tile

    def require_scales(self) -> None:
        """Refuse (NonFinite, with the place) a block scale that means NaN and yet decodes to a finite number."""
        if has_bad_scale(self.raw, self.ggml):
            row = next(row for row, blocks in enumerate(self.by_row) if has_bad_scale(blocks, self.ggml))
            raise FormatError("NonFinite", f"{self.name} has a NaN block scale in row {row}", path=self.path)

    def require_finite(self, start: int, rows: np.ndarray) -> None:
        """Refuse decoded rows from number `start` on, see `require_finite`."""
        require_finite(rows, self.name, self.path, first_row=start)

    @property
    def ggml(self) -> GGMLType:
        """The type of ggml; TypeError for a matrix of a quantised folder, which has none."""
        if not isinstance(self.ggml_type, GGMLType):
            raise TypeError(f"{self.name}: expected a type of ggml, got {self.ggml_type.name}")
        return self.ggml_type


def require_finite(array: np.ndarray, name: str, path: Path, *, first_row: int = 0) -> None:
    """Refuse (NonFinite, with the place) an array, or rows of one from a number on, with NaN or infinity."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _SCAN):
        finite = np.isfinite(flat[start : start + _SCAN])
        if not finite.all():
            first = start + int(np.argmin(finite))
            row, *rest = (int(axis) for axis in np.unravel_index(first, array.shape))
            raise FormatError("NonFinite", f"{name} has {flat[first]} at {(first_row + row, *rest)}", path=path)
