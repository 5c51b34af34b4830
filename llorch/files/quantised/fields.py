"""Matrix of a quantised folder in the form that kernels multiply: codes that index a table, scales and offsets.

A `Table` has the numbers of the codes, four bits per code if there are at most 16, else eight. Each field is a matrix
with as many rows as the weight. A group is the adjacent columns of a row that share a scale, 16 or a multiple of 32.

    field    dtype    columns      meaning
    codes    uint8    in / 2, in   four bits, see below, or eight bits in the order of the elements
    d        float32  groups       x = d * (values[code] - zero) + minimum; the table's factor or divisor applies last
    zero     float32  groups       absent if all are equal: then the values include them
    minimum  float32  groups       absent if all are 0

32 codes of four bits are four little-endian words, and element 4 * j + i is bits 4 * j to 4 * j + 3 of word i. So a
thread that loads 16 bytes has 32 codes, and the inputs of part j of its words are adjacent.

Decoding applies the operations of `QuantisedMatrix.decode_rows` in the same order, so both have the same bits. These
matrices have no table, and are decoded in NumPy:

    row length not divisible by 32
    scales whose groups have different sizes, or sizes not divisible by 16

`packing.c` repacks codes from the bytes of the file; without a compiler, NumPy uses one byte per code in between.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import numpy as np
from jaxtyping import Float32, Int, UInt8

from llorch.files.packed import Packed, Rows, Scheme
from llorch.files.quantised.blocks import RUN, by_run, group_size, read_all
from llorch.files.quantised.codes import E4M3, INT8
from llorch.files.quantised.matrix import Parts, QuantisedMatrix, Reader, StoredPart, Unpacker
from llorch.ops.compiled.library import find_compiler, library

Fields = Mapping[str, np.ndarray]
TABLES: Mapping[str, int] = MappingProxyType({"TABLE_4": 16, "TABLE_8": 256})  # numbers of a table
ORDERS = {"rows": 0, "high first": 1, "columns": 2, "awq": 3}  # `order` in packing.c
LOOK_UP, SIGNED, E4M3_BITS, EVEN, SHORT, SHIFTED = range(6)  # `way` to decode in products.c
_HALF_RUN = 16  # columns of the smallest group that kernels support
_SCALE_BYTES = 4
_AT_ONCE = 1 << 22  # elements whose codes are unpacked at a time
_SCAN = 1 << 18  # codes compared at a time: their mask fits the processor cache


@dataclass(frozen=True, slots=True)
class Table(Scheme):
    """Kind of matrix whose codes of four or eight bits index a table of numbers; `name` is a key of `TABLES`."""

    values: bytes  # 16 or 256 numbers, float32
    has_zeros: bool = False  # zero points are a field; else the values include them
    factor: float | None = None  # float32 factor of all numbers
    divisor: float | None = None

    @property
    def numbers(self) -> Float32[np.ndarray, " codes"]:
        """Number of each code, before zero point and scale."""
        return np.frombuffer(self.values, np.float32)

    @property
    def factors(self) -> Float32[np.ndarray, "2"]:
        """Factor and divisor of all numbers, 1 if there is none."""
        return np.array([1 if number is None else number for number in (self.factor, self.divisor)], np.float32)


def code_table(matrix: Packed) -> Table | None:
    """Return the table by which kernels decode a matrix; None if they cannot. Reads zero points."""
    if not isinstance(matrix, QuantisedMatrix) or matrix.shape[1] % RUN:
        return None
    matrix = _in_group_order(matrix)
    if group_size(matrix) is None or scale_columns(matrix) % _HALF_RUN:
        return None
    recipe, code_values = matrix.recipe, matrix.values
    zero = None if recipe.zero is None else read_all(matrix, recipe.zero)
    has_zeros = zero is not None and bool(zero.min() != zero.max())
    if zero is not None and not has_zeros:
        code_values = code_values - zero.flat[0]
    if has_zeros and recipe.minimum is not None:
        return None
    name = "TABLE_4" if len(code_values) <= TABLES["TABLE_4"] else "TABLE_8"
    padded = code_values[0] + np.arange(TABLES[name], dtype=np.float32)  # so integers stay a sequence, decoded faster
    padded[: len(code_values)] = code_values
    divisor = None if recipe.divisor is None else float(read_all(matrix, recipe.divisor)[0, 0])
    factor = None if recipe.factor is None else float(recipe.factor)
    return Table(name, padded.tobytes(), has_zeros, factor, divisor)


def scale_columns(matrix: QuantisedMatrix) -> int:
    """Return the columns per scale in the fields: the folder's if a multiple of 32, else 16 or its divisor."""
    size = group_size(_in_group_order(matrix))
    assert size is not None
    size = gcd(size, matrix.shape[1])  # if the last group is shorter: smaller groups of one size, which repeat scales
    return size if size % RUN == 0 else gcd(size, _HALF_RUN)


def count_bytes(matrix: QuantisedMatrix, table: Table, elements: int) -> int:
    """Return an upper bound of the bytes of the fields of `elements`, with the table and groups of a matrix."""
    scales = 2 * _SCALE_BYTES * elements // scale_columns(matrix)  # scales, and zero points or minima
    return elements * (1 if table.name == "TABLE_8" else 2) // 2 + scales


def _in_group_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Move columns that share a scale next to each other, and record the group size; other matrices stay."""
    recipe, group, size = matrix.recipe, matrix.recipe.group, group_size(matrix)
    if not callable(group):
        return matrix
    if size is not None:
        return replace(matrix, recipe=replace(recipe, group=size))
    order = group_order(matrix)
    if order is None:
        return matrix

    def codes(parts: Parts, rows: Rows) -> np.ndarray:
        return recipe.codes(parts, rows)[:, order]

    return replace(matrix, recipe=replace(recipe, codes=codes, group=int(np.bincount(group(matrix.parts))[0])))


def group_order(matrix: Packed) -> Int[np.ndarray, " in"] | None:
    """Return the new order of columns, for a matrix with groups of equal size but scattered columns; else None."""
    if not isinstance(matrix, QuantisedMatrix) or not callable(matrix.recipe.group) or group_size(matrix) is not None:
        return None
    group_index = matrix.recipe.group(matrix.parts)
    counts = np.bincount(group_index)
    return np.argsort(group_index, kind="stable") if (counts == counts[0]).all() else None


def pack_table(
    matrix: QuantisedMatrix, table: Table, empty: Callable[[int, int], np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Split a matrix into fields, with columns in `group_order`.

    `empty` allocates the codes, bytes of rows and columns; None: codes that the file has in this form are a view of it.
    """
    matrix = _in_group_order(matrix)
    recipe = matrix.recipe
    fields = {"codes": _packed_codes(matrix, table, empty), "d": _read_groups(matrix, recipe.scale)}
    if recipe.minimum is not None:
        fields["minimum"] = _read_groups(matrix, recipe.minimum)
    if table.has_zeros and recipe.zero is not None:
        fields["zero"] = _read_groups(matrix, recipe.zero)
    return fields


def _read_groups(matrix: QuantisedMatrix, reader: Reader) -> Float32[np.ndarray, "rows groups"]:
    return np.array(by_run(matrix, reader, slice(None), scale_columns(matrix)), np.float32, order="C")


def _packed_codes(
    matrix: QuantisedMatrix, table: Table, empty: Callable[[int, int], np.ndarray] | None
) -> UInt8[np.ndarray, "out bytes"]:
    """Pack the codes: in C if it knows their order, else some rows at a time."""
    codes, (n_out, n_in) = matrix.recipe.codes, matrix.shape
    if isinstance(codes, Unpacker) and matrix.own_rows is None:
        packed = packed_codes(codes, matrix.parts[codes.part], quiet_library(), empty)
        if packed is not None:
            return packed
    packed = (empty or _empty_bytes)(n_out, n_in // 2 if table.name == "TABLE_4" else n_in)
    step = max(32, _AT_ONCE // n_in // 32 * 32)  # whole words of formats that pack along the rows
    for start in range(0, n_out, step):
        rows = slice(start, min(start + step, n_out))
        bytes_of_codes = codes(matrix.parts, matrix.stored(rows))
        packed[rows] = join_four_bits(bytes_of_codes) if table.name == "TABLE_4" else bytes_of_codes
    return packed


def _empty_bytes(n_rows: int, n_columns: int) -> UInt8[np.ndarray, "rows columns"]:
    return np.empty((n_rows, n_columns), np.uint8)


def quiet_library() -> ctypes.CDLL | None:
    """Load the library that packs codes; None without a compiler (`library` would warn, but here NumPy is enough)."""
    return library() if find_compiler() else None


def packed_codes(
    codes: Unpacker, part: StoredPart, compiled: ctypes.CDLL | None, empty: Callable[[int, int], np.ndarray] | None
) -> UInt8[np.ndarray, "out bytes"] | None:
    """Pack the codes of a whole matrix; None if C cannot pack them, for example codes of 3 bits.

    The result is also None for a part with more than the codes, such as padding, or less. `empty`: see `pack_table`.
    """
    n_out, n_in = codes.shape
    if codes.bits not in (4, 8) or part.raw.nbytes != n_out * n_in * codes.bits // 8:
        return None
    if codes.bits == 8 and codes.order == "rows":
        stored = codes({codes.part: part}, slice(0, n_out))
        if empty is None:
            return np.ascontiguousarray(stored)
        packed = empty(n_out, n_in)
        packed[...] = stored
        return packed
    if compiled is None:
        return None
    packed = (empty or _empty_bytes)(n_out, n_in * codes.bits // 8)
    raw_codes, order = np.ascontiguousarray(part.raw), ORDERS[codes.order]
    compiled.llorch_pack_codes(order, codes.bits, raw_codes.ctypes.data, packed.ctypes.data, n_out, n_in)
    return packed


def join_four_bits(codes: UInt8[np.ndarray, "out in"]) -> UInt8[np.ndarray, "out bytes"]:
    """Pack codes of four bits, a row length of a multiple of 32."""
    halves = codes.reshape(len(codes), -1, 4, 2, 4)  # (out, runs, byte, half, word)
    return (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).swapaxes(2, 3).reshape(len(codes), -1)


def has_finite_numbers(fields: Fields, table: Table) -> bool:
    """Tell if every code stands for a finite number and no scaled number can overflow."""
    is_finite = np.isfinite(table.numbers)
    if table.name == "TABLE_4" and not is_finite.all():  # a byte has two codes
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.abs(table.numbers[is_finite]).max()
        if "zero" in fields:
            largest += np.abs(fields["zero"]).max()
        largest *= np.abs(fields["d"]).max()
        if "minimum" in fields:
            largest += np.abs(fields["minimum"]).max()
        scaled = largest * table.factors[0] / table.factors[1]
    if not (np.isfinite(largest) and np.isfinite(scaled)):
        return False
    codes, not_finite = fields["codes"].reshape(-1), np.flatnonzero(~is_finite).astype(np.uint8)
    chunks = (codes[start : start + _SCAN] for start in range(0, codes.size if len(not_finite) else 0, _SCAN))
    return not any((chunk == code).any() for chunk in chunks for code in not_finite)


def shared_by_rows(table: Table, fields: Fields) -> Float32[np.ndarray, " numbers"]:
    """Build the array of everything that all rows share, in the layout of `shared` in products.c."""
    columns = fields["codes"].shape[1] * (2 if table.name == "TABLE_4" else 1) // fields["d"].shape[1]
    offset = 1 if "zero" in fields else 2 if "minimum" in fields else 0
    way = _way(table, fields)
    centre = _centre(fields) if way == EVEN else np.float32(0)
    numbers = np.zeros(256, np.float32)
    numbers[: TABLES[table.name]] = table.numbers
    tables = numbers, numbers - centre
    first_numbers = [np.ascontiguousarray(of_codes[:16]) for of_codes in tables]
    if table.name == "TABLE_4" and way == EVEN and columns % RUN == 0 and _are_shifts(fields, numbers[0]):
        way = SHIFTED
    elif table.name == "TABLE_4":
        way = LOOK_UP if any((of_codes.view(np.uint32) & 0xFFFF).any() for of_codes in first_numbers) else SHORT
    integers = np.array([columns // RUN, way, offset], np.int32).view(np.float32)
    in_bytes = [of_codes.view(np.uint8).reshape(16, 4).T.ravel().view(np.float32) for of_codes in first_numbers]
    return np.concatenate((integers, table.factors, [centre], *tables, *in_bytes))


def _are_shifts(fields: Fields, first: np.floating) -> bool:
    """Tell if every zero point is the first number plus an integer from 0 to 16; False without zero points."""
    if (zero := fields.get("zero")) is None or not (zero == np.round(zero)).all():
        return False
    return bool(((zero >= first) & (zero <= first + 16)).all())


def _centre(fields: Fields) -> np.float32:
    """Return the integer nearest to the mean code that decodes to 0; 0 without minima. Codes minus it are summed."""
    if "minimum" not in fields or not (n_scaled := np.count_nonzero(fields["d"])):
        return np.float32(0)
    codes = np.divide(-fields["minimum"], fields["d"], out=np.zeros_like(fields["d"]), where=fields["d"] != 0)
    return np.float32(np.clip(np.round(codes.sum() / n_scaled), 0, 255))


def _way(table: Table, fields: Fields) -> int:
    """Return how a code becomes its number: `EVEN` for integers in sequence, a formula, or a table."""
    if table.values == INT8.tobytes():
        return SIGNED
    if table.values == E4M3.tobytes() and "zero" not in fields:
        return E4M3_BITS
    numbers = table.numbers
    return EVEN if np.array_equal(numbers, np.round(numbers[0]) + np.arange(len(numbers))) else LOOK_UP
