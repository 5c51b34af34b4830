"""Matrix of a quantised folder as fields that kernels multiply: codes that index a table, scales and offsets.

Each field is a matrix with as many rows as the weight. A group is 16, or a multiple of 32, adjacent columns of a row,
which share a scale. Columns whose groups are scattered are moved, see `group_order`.

    codes    uint8    (out, in / 2)    four bits, if the table has at most 16 numbers, see below
                      (out, in)        eight bits, in the order of the elements
    d        float32  (out, groups)    x = d * (values[code] - zero) + minimum, times a factor or over a divisor
    zero     float32  (out, groups)    absent if all are equal: then the values include them
    minimum  float32  (out, groups)    absent if all are 0

32 codes of four bits are four little-endian words: element 4 * j + i is bits 4 * j to 4 * j + 3 of word i.

Decoding applies the operations of `QuantisedMatrix.decode_rows` in the same order, so both have the same bits. A matrix
has no table if its row length is not divisible by 32, or its groups differ in size or have a size not divisible by 16.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import numpy as np
from jaxtyping import Float32, Int, UInt8

from llorch.files.packed import Packed, Scheme
from llorch.files.quantised.blocks import RUN, by_run, group_size, read_all
from llorch.files.quantised.codes import E4M3, INT8
from llorch.files.quantised.matrix import QuantisedMatrix, Reader, Unpacker
from llorch.ops.compiled.library import find_compiler, library

Fields = Mapping[str, np.ndarray]
Allocate = Callable[[tuple[int, int], type[np.uint8]], np.ndarray]
TABLES: Mapping[str, int] = MappingProxyType({"TABLE_4": 16, "TABLE_8": 256})  # numbers of a table
ORDERS = {"rows": 0, "high first": 1, "columns": 2, "awq": 3}  # `order` in packing.c
LOOK_UP, SIGNED, E4M3_BITS, EVEN = range(4)  # `way` to decode in products.c
_HALF_RUN = 16  # columns of the smallest group that kernels support
_SCALE_BYTES = 4
_AT_ONCE = 1 << 22  # elements whose codes are unpacked at a time
_LARGEST = 3.4e38  # nearly the largest float32
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
    return size if size % RUN == 0 else gcd(size, _HALF_RUN)


def count_bytes(matrix: QuantisedMatrix, table: Table, elements: int) -> int:
    """Return an upper bound of the bytes of the fields of `elements`, with the table and groups of a matrix."""
    scales = 2 * _SCALE_BYTES * elements // scale_columns(matrix)  # scales, and zero points or minima
    return elements // (2 if table.name == "TABLE_4" else 1) + scales


def _in_group_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """Move columns that share a scale next to each other, and record the group size; other matrices stay."""
    recipe, group, size = matrix.recipe, matrix.recipe.group, group_size(matrix)
    if not callable(group):
        return matrix
    if (order := group_order(matrix)) is not None:
        codes, size = recipe.codes, int(np.bincount(group(matrix.parts))[0])
        recipe = replace(recipe, codes=lambda parts, rows: codes(parts, rows)[:, order])
    return matrix if size is None else replace(matrix, recipe=replace(recipe, group=size))


def group_order(matrix: Packed) -> Int[np.ndarray, " in"] | None:
    """Return the new order of columns, for a matrix with groups of equal size but scattered columns; else None."""
    if not isinstance(matrix, QuantisedMatrix) or not callable(matrix.recipe.group) or group_size(matrix) is not None:
        return None
    group_index = matrix.recipe.group(matrix.parts)
    counts = np.bincount(group_index)
    return np.argsort(group_index, kind="stable") if (counts == counts[0]).all() else None


def pack_table(matrix: QuantisedMatrix, table: Table, empty: Allocate | None = None) -> dict[str, np.ndarray]:
    """Split a matrix into fields; `empty` allocates the codes. None: codes in order are a view of a file."""
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


def _packed_codes(matrix: QuantisedMatrix, table: Table, empty: Allocate | None) -> UInt8[np.ndarray, "out bytes"]:
    """Pack the codes: in C, from the bytes of the file, if it knows their order; else some rows at a time."""
    codes, (n_out, n_in), bits = matrix.recipe.codes, matrix.shape, 4 if table.name == "TABLE_4" else 8
    is_in_order = isinstance(codes, Unpacker) and (codes.bits, codes.order) == (8, "rows")
    if is_in_order and empty is None:
        return np.ascontiguousarray(codes(matrix.parts, matrix.stored(slice(n_out))))
    packed = (empty or np.empty)((n_out, n_in * bits // 8), np.uint8)
    if isinstance(codes, Unpacker) and codes.bits == bits and not is_in_order and matrix.own_rows is None:
        raw, compiled = np.ascontiguousarray(matrix.parts[codes.part].raw), quiet_library()
        if compiled is not None and raw.nbytes == packed.nbytes:  # a part may have padding
            pointers = raw.ctypes.data, packed.ctypes.data
            compiled.llorch_pack_codes(ORDERS[codes.order], bits, *pointers, n_out, n_in)
            return packed
    step = max(32, _AT_ONCE // n_in // 32 * 32)  # whole words of formats that pack along the rows
    for start in range(0, n_out, step):
        rows = slice(start, min(start + step, n_out))
        bytes_of_codes = codes(matrix.parts, matrix.stored(rows))
        packed[rows] = join_four_bits(bytes_of_codes) if bits == 4 else bytes_of_codes
    return packed


def quiet_library() -> ctypes.CDLL | None:
    """Load the library that packs codes; None without a compiler (`library` would warn, but here NumPy is enough)."""
    return library() if find_compiler() else None


def join_four_bits(codes: UInt8[np.ndarray, "out in"]) -> UInt8[np.ndarray, "out bytes"]:
    """Pack codes of four bits, a row length of a multiple of 32."""
    halves = codes.reshape(len(codes), -1, 4, 2, 4)  # (out, runs, byte, half, word)
    return (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).swapaxes(2, 3).reshape(len(codes), -1)


def has_finite_numbers(fields: Fields, table: Table) -> bool:
    """Tell if every code stands for a finite number and no scaled number can overflow."""
    is_finite = np.isfinite(table.numbers)
    if table.name == "TABLE_4" and not is_finite.all():  # a byte has two codes
        return False
    sizes = {name: float(np.abs(field).max()) for name, field in fields.items() if name != "codes"}
    number, factors = np.where(is_finite, np.abs(table.numbers), 0).max(), np.abs(table.factors, dtype=np.float64)
    unscaled = (float(number) + sizes.get("zero", 0)) * sizes["d"] + sizes.get("minimum", 0)
    if not max(unscaled, unscaled * factors[0], unscaled * factors[0] / factors[1]) < _LARGEST:
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
    integers = np.array([columns // RUN, way, offset], np.int32).view(np.float32)
    return np.concatenate((integers, table.factors, [centre], *tables))


def _centre(fields: Fields) -> np.float32:
    """Return the integer nearest to the mean code that decodes to 0; 0 without minima. Codes minus it are summed."""
    if "minimum" not in fields or not (n_scaled := np.count_nonzero(fields["d"])):
        return np.float32(0)
    has_scale, codes = fields["d"] != 0, np.zeros(fields["d"].shape)
    np.divide(-fields["minimum"], fields["d"], out=codes, where=has_scale, dtype=np.float64)  # cannot overflow
    return np.float32(np.clip(np.round(codes.sum() / n_scaled), 0, 255))


def _way(table: Table, fields: Fields) -> int:
    """Return how a code becomes its number: `EVEN` for integers in sequence, a formula, or a table."""
    if table.values == INT8.tobytes():
        return SIGNED
    if table.values == E4M3.tobytes() and "zero" not in fields:
        return E4M3_BITS
    numbers = table.numbers
    return EVEN if np.array_equal(numbers, np.round(numbers[0]) + np.arange(len(numbers))) else LOOK_UP
