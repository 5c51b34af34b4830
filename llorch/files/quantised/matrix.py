"""Matrix of a quantised Hugging Face folder: codes, scales and zero points.

    W[n, k] = (value[code[n, k]] - zero[n, g]) * scale[n, g] + minimum[n, g]        g = the group of column k

A factor or divisor of the whole matrix may be applied at the end.

Every format of `llorch.files.quantised` has this form. Formats differ in the bits per code, the values of the codes
(integers, E2M1, E4M3, a stored table), the storage of scales and zero points, and the columns that share them. The
difference of two codes is exact in float32; the product is rounded once, and is exact for scales of 8 or 16 bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from llorch.files.packed import Packed, Rows
from llorch.files.quant import GGMLType, decode
from llorch.files.quantised.codes import E4M3, E8M0, awq, high_first, stream
from llorch.runtime.errors import FormatError

_VIEWS = {  # NumPy dtype of the bytes, by stored dtype
    "U8": np.uint8, "I8": np.int8, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
_TABLES = {"F8_E4M3": E4M3, "F8_E8M0": E8M0}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Stored tensor that is a part of a matrix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: np.ndarray  # uint8

    @property
    def array(self) -> np.ndarray:
        """View of the tensor; small floats and bfloat16 as unsigned integers."""
        raw = self.raw if self.raw.ctypes.data % 8 == 0 else self.raw.copy()  # aligned for the widest dtype
        return raw.view(np.dtype(_VIEWS[self.dtype]).newbyteorder("<")).reshape(self.shape)

    def floats(self, rows: Rows = slice(None)) -> Float32[np.ndarray, "..."]:
        """Return some rows as float32, exact for all dtypes except F64."""
        selected = self.array.reshape(self.shape or (1,))[rows]
        if self.dtype in _TABLES:
            return _TABLES[self.dtype][selected]
        if self.dtype == "BF16":
            return decode(np.ascontiguousarray(selected).view(np.uint8).reshape(-1), GGMLType.BF16, selected.shape)
        return selected.astype(np.float32)


Parts = Mapping[str, StoredPart]  # by the format's name of the part: qweight, scales, ...


@runtime_checkable
class Reader(Protocol):
    """Function that reads codes or scales of some rows from the parts of a matrix."""

    def __call__(self, parts: Parts, rows: Rows, /) -> np.ndarray:
        """Unpack the rows as (rows, columns or groups)."""
        ...


Order = Literal["rows", "high first", "columns", "awq"]


@dataclass(frozen=True, slots=True)
class Unpacker:
    """Reader of codes, with their order in a part.

    order        part                        codes
    rows         (out, words)                a code stream along each row
    high first   (out * in / 2 bytes)        4 bits, two per byte, high nibble first, row after row
    columns      (in * bits / 32, out)       a code stream down each column of 32-bit words
    awq          (in, out / 8)               4 bits, 8 rows per 32-bit word in the order of AWQ
    """

    part: str
    bits: int
    shape: tuple[int, ...]  # out, in
    order: Order = "rows"

    def __call__(self, parts: Parts, rows: Rows, /) -> UInt8[np.ndarray, "rows in"]:
        """Unpack the codes of some rows, one per byte."""
        data, (n_out, n_in) = parts[self.part].array, self.shape
        match self.order:
            case "rows":
                return stream(data[rows], self.bits, n_in)
            case "high first":
                return high_first(data.reshape(-1), rows, n_in)
            case "columns":
                return stream(data[:, rows].T, self.bits, n_in)
            case "awq":
                return awq(data, rows, n_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Decoding rule of a matrix, with the formula of this module."""

    codes: Reader  # (rows, in) uint8
    values: np.ndarray | Callable[[Parts], np.ndarray]  # float32 by code; the table may be a stored part
    scale: Reader  # (rows, groups) float32
    zero: Reader | None = None  # (rows, groups) float32
    minimum: Reader | None = None  # (rows, groups) float32
    factor: np.float32 | None = None  # applied last
    divisor: Reader | None = None  # (1, 1) float32; divides last
    group: int | Callable[[Parts], np.ndarray]  # number of columns per scale, or the group of each column
    zero_scales: bool = False  # a scale of 0 is valid: all values of the group are 0
    check: Callable[[Parts], str | None] = lambda parts: None  # error message for contradictory parts


@dataclass(frozen=True)
class QuantisedMatrix(Packed):
    """Stored matrix of a quantised folder; `raw` has the bytes of its codes."""

    parts: Parts
    recipe: Recipe
    own_rows: np.ndarray | None = None  # if `picked` selected rows: the index of each in `parts`

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors of the matrix."""
        return sum(part.raw.size for part in self.parts.values())

    @property
    def values(self) -> np.ndarray:
        """Value of each code, before zero point and scale."""
        values = self.recipe.values
        return values(self.parts) if callable(values) else values

    @property
    def by_row(self) -> np.ndarray:
        """Raise TypeError: rows of these formats are not contiguous bytes."""
        raise TypeError(f"{self.name}: {self.ggml_type.name} has no bytes of one row")

    def decode(self) -> np.ndarray:
        """Decode the whole matrix to float32."""
        decoded = np.empty(self.shape, np.float32)
        for start, tile in self.tiles():
            decoded[start : start + len(tile)] = tile
        return decoded

    def decode_rows(self, rows: Rows) -> np.ndarray:
        """Decode some rows to float32."""
        recipe, rows = self.recipe, self.stored(rows)
        with np.errstate(all="ignore"):  # the caller checks for non-finite values
            decoded = self.values[recipe.codes(self.parts, rows)]
            if recipe.zero is not None:
                decoded -= self.spread(recipe.zero(self.parts, rows))
            decoded = decoded * self.spread(recipe.scale(self.parts, rows))
            if recipe.minimum is not None:
                decoded += self.spread(recipe.minimum(self.parts, rows))
            if recipe.factor is not None:
                decoded *= recipe.factor
            if recipe.divisor is not None:
                decoded /= recipe.divisor(self.parts, rows)
        return decoded

    def decode_rows_into(self, rows: slice, out: np.ndarray) -> None:
        """Write some rows into a float32 array."""
        out[...] = self.decode_rows(rows)

    def picked(self, rows: Rows) -> "QuantisedMatrix":
        """Return the matrix of some rows, over the same parts."""
        stored_rows = self.stored(rows)
        stored_rows = np.arange(self.shape[0])[stored_rows] if isinstance(stored_rows, slice) else stored_rows
        return replace(self, own_rows=stored_rows, shape=(len(stored_rows), self.shape[1]))

    def has_equal_values(self, other: Packed) -> bool:
        """Check if the decoded values are equal."""
        return np.array_equal(self.decode(), other.decode())

    def require_scales(self) -> None:
        """Raise NonFinite, OutOfRange or Inconsistent, with tensor and position, for invalid scales."""
        if problem := self.recipe.check(self.parts):
            raise FormatError("Inconsistent", problem, path=self.path)
        recipe = self.recipe
        readers = ((recipe.scale, recipe.zero_scales), (recipe.minimum, True), (recipe.divisor, False))
        for reader, may_be_zero in readers:
            if reader is None:
                continue
            numbers = reader(self.parts, self.stored(slice(None)))
            is_invalid = ~np.isfinite(numbers) if may_be_zero else ~np.isfinite(numbers) | (numbers == 0)
            if is_invalid.any():
                row, group = (int(axis) for axis in np.argwhere(is_invalid)[0])
                actual = numbers[row, group]
                code = "NonFinite" if not np.isfinite(actual) else "OutOfRange"
                message = f"{self.name}: expected a finite scale{'' if may_be_zero else ' other than 0'}, got {actual}"
                raise FormatError(code, f"{message} in row {row}, group {group}", path=self.path)

    def spread(self, numbers: Shaped[np.ndarray, "rows groups"]) -> np.ndarray:
        """Repeat group values for each column."""
        group, n_in = self.recipe.group, self.shape[1]
        if callable(group):
            return numbers[:, group(self.parts)]
        if numbers.shape[1] == 1 or group == 1:
            return numbers
        return np.repeat(numbers, group, axis=1)[:, :n_in]

    def stored(self, rows: Rows) -> Rows:
        """Map rows of this matrix to rows of its parts."""
        if self.own_rows is not None:
            return self.own_rows[rows]
        return slice(*rows.indices(self.shape[0])[:2]) if isinstance(rows, slice) else rows


def grouping(parts: Mapping[str, str], size: int) -> int | Callable[[Parts], np.ndarray]:
    """Return the `group` of a recipe: a size, or the reader of each column's group if the file lists them (`g_idx`)."""
    return (lambda stored_parts: stored_parts["g_idx"].array) if "g_idx" in parts else size


def name_groups(size: int, n_in: int) -> str:
    """Format the group size for display."""
    return "one scale a row" if size == n_in else f"groups of {size}"


def floats_of(part: str, *, block: int = 1) -> Reader:
    """Return a reader of floats stored as one number, a column, (rows, groups), or (blocks of `block` rows, groups).

    The reader returns (rows, groups), or (1, 1) for one number.
    """

    def read(parts: Parts, rows: Rows) -> Float32[np.ndarray, "rows groups"]:
        tensor = parts[part]
        if np.prod(tensor.shape) == 1:
            return tensor.floats().reshape(1, 1)
        if block == 1:
            return tensor.floats(rows).reshape(-1, 1 if len(tensor.shape) == 1 else tensor.shape[1])
        ids = np.arange(*rows.indices(tensor.shape[0] * block)) if isinstance(rows, slice) else rows
        return tensor.floats()[ids // block]

    return read
