"""Stored tensor: bytes, type and shape; its rows are decoded on demand."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llorch.files.quant import BLOCK_SIZES, GGMLType, decode, decode_into, has_bad_scale
from llorch.runtime.errors import FormatError

TILE = 1 << 20  # elements decoded at once: enough for a fast product, little memory
_SCAN = 1 << 18  # elements checked at once, so that the mask stays in the processor cache

Rows = slice | np.ndarray


@dataclass(frozen=True, slots=True)
class Scheme:
    """Type of a matrix in a quantised Hugging Face folder, in place of a ggml type."""

    name: str  # for display: method, bits, and columns per scale


StoredType = GGMLType | Scheme


def has_codes(kind: StoredType) -> bool:
    """Check if a type stores codes with scales, so that it cannot represent every float."""
    return not isinstance(kind, GGMLType) or BLOCK_SIZES[kind][0] > 1


@dataclass(frozen=True)
class Packed:
    """Stored tensor; `Rows` of a matrix are a slice or row indices."""

    name: str
    path: Path
    raw: np.ndarray  # uint8
    ggml_type: StoredType  # or the scheme of a quantised folder
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Number of bytes of the tensor in its file."""
        return self.raw.size

    @property
    def by_row(self) -> np.ndarray:
        """Bytes of a matrix, one row per matrix row; a vector is one row."""
        return self.raw.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1)

    def decode(self) -> np.ndarray:
        """Decode the whole tensor to float32."""
        return decode(self.raw, self.ggml, self.shape)

    def decode_rows(self, rows: Rows) -> np.ndarray:
        """Decode some rows of a matrix to float32."""
        row_bytes = self.by_row[rows]
        return decode(row_bytes, self.ggml, (len(row_bytes), *self.shape[1:]))

    def decode_rows_into(self, rows: slice, out: np.ndarray) -> None:
        """Write some rows of a matrix into a contiguous float32 array."""
        decode_into(self.by_row[rows], self.ggml, out)

    def picked(self, rows: Rows) -> "Packed":
        """Return a packed matrix of some rows; a view for a slice."""
        row_bytes = self.by_row[rows]
        return replace(self, raw=row_bytes.reshape(-1), shape=(len(row_bytes), *self.shape[1:]))

    def has_equal_values(self, other: "Packed") -> bool:
        """Check if the decoded values are equal; equal bytes are not decoded."""
        has_equal_bytes = self.ggml_type is other.ggml_type and np.array_equal(self.raw, other.raw)
        return has_equal_bytes or np.array_equal(self.decode(), other.decode())

    @property
    def rows_at_once(self) -> int:
        """Number of rows that are decoded together."""
        return min(self.shape[0], max(1, TILE // math.prod(self.shape[1:])))

    def tiles(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row index and the rows of each tile; the buffer is reused for the next tile."""
        step = self.rows_at_once
        buffer = np.empty((step, *self.shape[1:]), np.float32)
        for start in range(0, self.shape[0], step):
            tile = buffer[: self.shape[0] - start]
            self.decode_rows_into(slice(start, start + step), tile)
            yield start, tile

    def require_scales(self) -> None:
        """Raise NonFinite, with the row, for a NaN block scale that decodes to finite values."""
        if has_bad_scale(self.raw, self.ggml):
            row = next(row for row, blocks in enumerate(self.by_row) if has_bad_scale(blocks, self.ggml))
            raise FormatError("NonFinite", f"{self.name} has a NaN block scale in row {row}", path=self.path)

    def require_finite(self, start: int, rows: np.ndarray) -> None:
        """Check decoded rows, of which the first has index `start`; see `require_finite`."""
        require_finite(rows, self.name, self.path, first_row=start)

    @property
    def ggml(self) -> GGMLType:
        """Type of ggml; TypeError for a matrix of a quantised folder, which has none."""
        if not isinstance(self.ggml_type, GGMLType):
            raise TypeError(f"{self.name}: expected a type of ggml, got {self.ggml_type.name}")
        return self.ggml_type


def require_finite(array: np.ndarray, name: str, path: Path, *, first_row: int = 0) -> None:
    """Raise NonFinite, with the index, for NaN or infinity in an array, or in rows that start at `first_row`."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _SCAN):
        is_finite = np.isfinite(flat[start : start + _SCAN])
        if not is_finite.all():
            bad_index = start + int(np.argmin(is_finite))
            row, *columns = (int(axis) for axis in np.unravel_index(bad_index, array.shape))
            raise FormatError("NonFinite", f"{name} has {flat[bad_index]} at {(first_row + row, *columns)}", path=path)
