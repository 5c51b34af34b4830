"""Lossless repacking of a quantised matrix into a ggml block type.

    Q4_0, Q5_0, Q8_0   scale * integer             -8 to 7, -16 to 15, -128 to 127
    Q4_1, Q5_1         scale * integer + minimum   0 to 15, 0 to 31
    MXFP4              scale * E2M1                the scale is a power of two

A block has 32 columns. Scale and minimum must be float16 numbers. Nothing is rounded: a matrix with one value that does
not fit has no block type. MXFP4 has one zero, so the sign of a zero is lost there.

Source: ggml src/ggml-common.h (layouts), see `llorch.files.blocks`.
"""

from math import gcd

import numpy as np
from jaxtyping import Float32, UInt8

from llorch.files.packed import Packed, Rows
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.codes import E2M1
from llorch.files.quantised.matrix import QuantisedMatrix, Reader

RUN = 32  # columns of a block
_ALL = slice(None)
_INTEGERS = (  # type, least and largest integer, with a minimum
    (GGMLType.Q4_0, -8, 7, False), (GGMLType.Q5_0, -16, 15, False), (GGMLType.Q8_0, -128, 127, False),
    (GGMLType.Q4_1, 0, 15, True), (GGMLType.Q5_1, 0, 31, True),
)  # fmt: skip
_OFFSETS = {GGMLType.Q4_0: 8, GGMLType.Q5_0: 16}  # stored code minus integer
_FIFTH_BIT = (GGMLType.Q5_0, GGMLType.Q5_1)
_ROWS_AT_ONCE = 1 << 20  # elements packed at once


def block_type(matrix: QuantisedMatrix) -> GGMLType | str:
    """Return the smallest type that represents a matrix exactly, or the reason why there is none."""
    size, recipe, values = group_size(matrix), matrix.recipe, matrix.values
    is_fp4 = np.array_equal(values, E2M1)
    if not (is_fp4 or _are_integers(values)):
        return "codes are no integers"
    if size is None:
        return "columns that share a scale are not neighbours"
    if matrix.shape[1] % RUN or size % RUN:
        return f"groups of {gcd(size, matrix.shape[1])} columns, blocks have {RUN}"
    scale = read_all(matrix, recipe.scale)
    if is_fp4:
        only_scales = recipe.zero is None and recipe.minimum is None and recipe.factor is None
        return GGMLType.MXFP4 if only_scales and _are_exponents(scale) else "a scale of E2M1 codes is no power of two"
    zero = np.zeros(1, np.float32) if recipe.zero is None else read_all(matrix, recipe.zero)
    minimum = np.zeros(1, np.float32) if recipe.minimum is None else read_all(matrix, recipe.minimum)
    if not _are_integers(zero):
        return "a zero point is no integer"
    if recipe.factor is not None or not (fits_float16(scale) and fits_float16(minimum)):
        return "a scale or minimum is no float16 number"
    low, high, has_minimum = values.min() - zero.max(), values.max() - zero.min(), recipe.minimum is not None
    fits = (kind for kind, first, last, affine in _INTEGERS if first <= low and high <= last and affine == has_minimum)
    return next(fits, f"integers from {low:g} to {high:g}{' and a minimum' if has_minimum else ''}")


def blocks(matrix: QuantisedMatrix, kind: GGMLType) -> Packed:
    """Pack a matrix into the blocks of the type that `block_type` found."""
    n_out, n_in = matrix.shape
    raw = np.empty((n_out, n_in // RUN, BLOCK_SIZES[kind][1]), np.uint8)
    step = max(1, _ROWS_AT_ONCE // n_in)
    for start in range(0, n_out, step):
        rows = slice(start, min(start + step, n_out))
        _pack(matrix, kind, rows, raw[rows])
    return Packed(matrix.name, matrix.path, raw.reshape(-1), kind, matrix.shape)


def _pack(matrix: QuantisedMatrix, kind: GGMLType, rows: slice, out: UInt8[np.ndarray, "rows blocks bytes"]) -> None:
    codes, offset = integer_codes(matrix, kind, rows).reshape(*out.shape[:2], RUN), 0
    scale = by_run(matrix, matrix.recipe.scale, rows, RUN)
    if kind is GGMLType.MXFP4:
        out[..., 0], offset = np.frexp(scale)[1] + 126, 1  # E8M0 has bias 127; frexp counts from 0.5
    else:
        for reader in filter(None, (matrix.recipe.scale, matrix.recipe.minimum)):
            halves = by_run(matrix, reader, rows, RUN).astype("<f2")
            out[..., offset : offset + 2] = halves.view(np.uint8).reshape(*out.shape[:2], 2)
            offset += 2
    if kind is GGMLType.Q8_0:
        out[..., offset:] = codes
        return
    if kind in _FIFTH_BIT:
        out[..., offset : offset + 4], offset = np.packbits(codes >> 4, axis=-1, bitorder="little"), offset + 4
    out[..., offset:] = codes[..., :16] & 15 | (codes[..., 16:] & 15) << 4


def integer_codes(matrix: QuantisedMatrix, kind: GGMLType, rows: Rows) -> UInt8[np.ndarray, "rows in"]:
    """Return the codes of some rows with the offset of a block type; codes of Q8_0 are signed bytes."""
    recipe = matrix.recipe
    codes = recipe.codes(matrix.parts, matrix.stored(rows))
    if kind is GGMLType.MXFP4:
        return codes
    code_map = (matrix.values + _OFFSETS.get(kind, 0)).astype(np.int16).astype(np.uint8)  # modulo 256
    block_codes = code_map[codes]
    if recipe.zero is not None:
        block_codes -= matrix.spread(recipe.zero(matrix.parts, matrix.stored(rows)).astype(np.int16).astype(np.uint8))
    return block_codes


def group_size(matrix: QuantisedMatrix) -> int | None:
    """Return the number of columns per scale if groups are contiguous and equal in size; else None."""
    group, n_in = matrix.recipe.group, matrix.shape[1]
    if callable(group):
        numbers = group(matrix.parts)
        size = int(np.argmax(numbers != numbers[0])) or n_in
        return size if np.array_equal(numbers, np.arange(n_in) // size) else None
    return gcd(group, n_in)


def read_all(matrix: QuantisedMatrix, reader: Reader) -> Float32[np.ndarray, "rows groups"]:
    """Read the numbers of all groups."""
    return reader(matrix.parts, matrix.stored(_ALL))


def by_run(matrix: QuantisedMatrix, reader: Reader, rows: Rows, size: int) -> Float32[np.ndarray, "rows runs"]:
    """Read the values of some rows for every run of `size` columns, which divides `group_size`."""
    numbers = reader(matrix.parts, matrix.stored(rows))
    n_rows = len(range(*rows.indices(matrix.shape[0]))) if isinstance(rows, slice) else len(rows)
    n_runs = matrix.shape[1] // size
    if numbers.shape[1] == 1:
        return np.broadcast_to(numbers, (n_rows, n_runs))
    group = matrix.recipe.group if isinstance(matrix.recipe.group, int) else group_size(matrix)
    assert group is not None
    return np.repeat(np.broadcast_to(numbers, (n_rows, numbers.shape[1])), group // size, axis=1)[:, :n_runs]


def fits_float16(numbers: Float32[np.ndarray, "..."]) -> bool:
    """Check if float16 represents all numbers exactly."""
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float16)
    return bool(np.isfinite(rounded).all()) and np.array_equal(rounded.astype(np.float32), numbers)


def _are_integers(numbers: Float32[np.ndarray, "..."]) -> bool:
    return bool(np.isfinite(numbers).all()) and np.array_equal(np.rint(numbers), numbers)


def _are_exponents(numbers: Float32[np.ndarray, "..."]) -> bool:
    """Check if all numbers are powers of two within E8M0."""
    return bool((np.isfinite(numbers) & (numbers > 0)).all() and (np.frexp(numbers)[0] == 0.5).all())
