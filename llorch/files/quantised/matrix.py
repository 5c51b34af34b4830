"""One matrix of a quantised Hugging Face folder: codes, and what makes numbers of them.

    W[n, k] = (value[code[n, k]] - zero[n, g]) * scale[n, g] + minimum[n, g]        g = the group of column k

One number of the whole matrix may multiply or divide that at the end.

Every format of `llorch.files.quantised` has this form. It differs in the bits of a code, in the values of the codes
(integers, E2M1, E4M3, a table of the file), in where scales and zero points lie, and in which columns share them. The
difference of two codes is exact in float32; the product is rounded once, and is exact too for scales of 8 or 16 bits.
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

_VIEWS = {
    "U8": np.uint8, "I8": np.int8, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
_TABLES = {"F8_E4M3": E4M3, "F8_E8M0": E8M0}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of the folder that a matrix is made of, as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: np.ndarray  # uint8

    @property
    def array(self) -> np.ndarray:
        """A view; small floats and bfloat16 as unsigned integers."""
        raw = self.raw if self.raw.ctypes.data % 8 == 0 else self.raw.copy()
        return raw.view(np.dtype(_VIEWS[self.dtype]).newbyteorder("<")).reshape(self.shape)

    def floats(self, rows: Rows = slice(None)) -> Float32[np.ndarray, "..."]:
        """Return some rows as float32, which holds every number of these dtypes except F64."""
        part = self.array.reshape(self.shape or (1,))[rows]
        if self.dtype in _TABLES:
            return _TABLES[self.dtype][part]
        if self.dtype == "BF16":
            return decode(np.ascontiguousarray(part).view(np.uint8).reshape(-1), GGMLType.BF16, part.shape)
        return part.astype(np.float32)


Parts = Mapping[str, StoredPart]  # by what the format calls them: qweight, scales, ...


@runtime_checkable
class Reader(Protocol):
    """Reads something of some rows out of the parts of a matrix."""

    def __call__(self, parts: Parts, rows: Rows, /) -> np.ndarray:
        """Unpack the rows as (rows, columns or groups)."""
        ...


Order = Literal["rows", "high first", "columns", "awq"]


@dataclass(frozen=True, slots=True)
class CodesOf:
    """Reads codes out of a part, and tells where they lie in it.

    order        part                        codes
    rows         (out, words)                a code stream along each row
    high first   (out * in / 2 bytes)        4 bits, two in a byte, the upper half first, one row after another
    columns      (in * bits / 32, out)       a code stream down each column of 32-bit words
    awq          (in, out / 8)               4 bits, 8 rows in a 32-bit word in the order of AWQ
    """

    part: str
    bits: int
    shape: tuple[int, ...]  # out, in
    order: Order = "rows"

    def __call__(self, parts: Parts, rows: Rows, /) -> UInt8[np.ndarray, "rows in"]:
        """Unpack the codes of some rows, one in a byte."""
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
    """The rule that makes the numbers of a matrix; `group`: columns that share a scale, or each column's group."""

    codes: Reader  # (rows, in) uint8
    values: np.ndarray | Callable[[Parts], np.ndarray]  # float32 by code; the table may be a part
    scale: Reader  # (rows, groups) float32
    zero: Reader | None = None  # (rows, groups) float32
    minimum: Reader | None = None  # (rows, groups) float32
    factor: np.float32 | None = None  # multiplied last
    divisor: Reader | None = None  # (1, 1) float32; divides last
    group: int | Callable[[Parts], np.ndarray]
    zero_scales: bool = False  # a scale of 0 has a meaning: all numbers of the group are 0
    check: Callable[[Parts], str | None] = lambda parts: None  # a contradiction, as a message


@dataclass(frozen=True)
class QuantisedMatrix(Packed):
    """A matrix as a quantised folder stores it; `raw` are the bytes of its codes."""

    parts: Parts
    recipe: Recipe
    own_rows: np.ndarray | None = None  # rows of the stored matrix, where some were picked

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.raw.size for part in self.parts.values())

    @property
    def values(self) -> np.ndarray:
        """The number of each code, before zero point and scale."""
        values = self.recipe.values
        return values(self.parts) if callable(values) else values

    @property
    def by_row(self) -> np.ndarray:
        """Refused: rows of these formats are no rows of bytes."""
        raise TypeError(f"{self.name}: {self.ggml_type.name} has no bytes of one row")

    def decode(self) -> np.ndarray:
        """Decode the whole matrix to float32."""
        whole = np.empty(self.shape, np.float32)
        for start, tile in self.tiles():
            whole[start : start + len(tile)] = tile
        return whole

    def decode_rows(self, rows: Rows) -> np.ndarray:
        """Decode some rows to float32."""
        recipe, rows = self.recipe, self.stored(rows)
        with np.errstate(all="ignore"):  # looked for by the caller
            made = self.values[recipe.codes(self.parts, rows)]
            if recipe.zero is not None:
                made -= self.spread(recipe.zero(self.parts, rows))
            made = made * self.spread(recipe.scale(self.parts, rows))
            if recipe.minimum is not None:
                made += self.spread(recipe.minimum(self.parts, rows))
            if recipe.factor is not None:
                made *= recipe.factor
            if recipe.divisor is not None:
                made /= recipe.divisor(self.parts, rows)
        return made

    def decode_rows_into(self, rows: slice, out: np.ndarray) -> None:
        """Write some rows into a float32 array."""
        out[...] = self.decode_rows(rows)

    def picked(self, rows: Rows) -> "QuantisedMatrix":
        """Return the matrix of some rows, still as stored."""
        stored = self.stored(rows)
        stored = np.arange(self.shape[0])[stored] if isinstance(stored, slice) else stored
        return replace(self, own_rows=stored, shape=(len(stored), self.shape[1]))

    def holds_the_same(self, other: Packed) -> bool:
        """Tell if the numbers of both are equal."""
        return np.array_equal(self.decode(), other.decode())

    def require_scales(self) -> None:
        """Refuse (NonFinite, OutOfRange, Inconsistent, with tensor and place) scales that cannot be meant."""
        if said := self.recipe.check(self.parts):
            raise FormatError("Inconsistent", said, path=self.path)
        recipe = self.recipe
        readers = ((recipe.scale, recipe.zero_scales), (recipe.minimum, True), (recipe.divisor, False))
        for reader, may_be_zero in readers:
            if reader is None:
                continue
            numbers = reader(self.parts, self.stored(slice(None)))
            wrong = ~np.isfinite(numbers) if may_be_zero else ~np.isfinite(numbers) | (numbers == 0)
            if wrong.any():
                row, group = (int(axis) for axis in np.argwhere(wrong)[0])
                actual = numbers[row, group]
                code = "NonFinite" if not np.isfinite(actual) else "OutOfRange"
                message = f"{self.name}: expected a finite scale{'' if may_be_zero else ' other than 0'}, got {actual}"
                raise FormatError(code, f"{message} in row {row}, group {group}", path=self.path)

    def spread(self, numbers: Shaped[np.ndarray, "rows groups"]) -> np.ndarray:
        """Repeat the numbers of the groups for each column."""
        group, n_in = self.recipe.group, self.shape[1]
        if callable(group):
            return numbers[:, group(self.parts)]
        if numbers.shape[1] == 1 or group == 1:
            return numbers
        return np.repeat(numbers, group, axis=1)[:, :n_in]

    def stored(self, rows: Rows) -> Rows:
        """Translate rows of this matrix to rows of the stored one."""
        if self.own_rows is not None:
            return self.own_rows[rows]
        return slice(*rows.indices(self.shape[0])[:2]) if isinstance(rows, slice) else rows


def columns_of(parts: Mapping[str, str], size: int) -> int | Callable[[Parts], np.ndarray]:
    """Return the `group` of a recipe: a size, or the reader of each column's group if the file lists them (`g_idx`)."""
    return (lambda parts: parts["g_idx"].array) if "g_idx" in parts else size


def name_groups(size: int, n_in: int) -> str:
    """Name, for people, the columns that share a scale."""
    return "one scale a row" if size == n_in else f"groups of {size}"


def floats_of(part: str, *, block: int = 1) -> Reader:
    """Read floats of one number, one column, (rows, groups), or (blocks of `block` rows, groups)."""

    def read(parts: Parts, rows: Rows) -> Float32[np.ndarray, "rows groups"]:
        stored = parts[part]
        if np.prod(stored.shape) == 1:
            return stored.floats().reshape(1, 1)
        if block == 1:
            return stored.floats(rows).reshape(-1, 1 if len(stored.shape) == 1 else stored.shape[1])
        ids = np.arange(*rows.indices(stored.shape[0] * block)) if isinstance(rows, slice) else rows
        return stored.floats()[ids // block]

    return read
