"""Kind (format) in which torch keeps a packed weight, and the fields of a matrix from a file or folder.

A packed matrix keeps its codes and scales; each of its fields is a tensor, see `kernels.packing`. A matrix of a GGUF
file keeps its type if `PACKERS` has this type. A matrix of a quantised folder becomes a `Table`, with 4 bits per code
if it has at most 16 different codes, else with 8 bits. Decoding applies the operations of `QuantisedMatrix.decode_rows`
in the same order, so both have the same bits. A group is the columns of a row that share a scale.

These matrices are decoded when they are loaded:

    row length not divisible by 32
    scales whose groups have different sizes, or sizes not divisible by 16
    experts with different tables, factors or divisors

A matrix in BF16 or F16, such as the embedding of a quantised folder, stays in 16 bits next to packed matrices if the
CPU computes in float32. In float32 it would take twice the memory, and its product twice the time. The numbers are
equal; only products of a few rows have another order of sums, except in mode "reproducible".
"""

import ctypes
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from math import gcd, prod
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from llorch.files import Weights
from llorch.files.packed import Packed, Rows
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.matrix import Parts, QuantisedMatrix, Reader, Unpacker
from llorch.files.tensor_names import undo_interleave
from llorch.ops.compiled.library import find_compiler, library
from llorch.pytorch.kernels.cpu.quantised import pack_blocks, packed_codes
from llorch.pytorch.kernels.packing import HALF_TYPES, PACKERS, RUN, TABLES, Kind, Table, join_four_bits, pack

_HALF_RUN = 16  # columns of the smallest group that kernels support
_SCALE_BYTES = 4
_AT_ONCE = 1 << 22  # elements whose codes are unpacked at a time
_BLOCKS_AT_ONCE = 1 << 18  # bytes of blocks packed at a time; they fit the processor cache
_KIND_CACHE: MutableMapping[object, dict[str, tuple[Kind | None, int]]] = WeakKeyDictionary()  # by opened file


def kind_of(weights: Weights, name: str) -> Kind | None:
    """Return the kind in which torch keeps a weight; None: decoded. Reads zero points of a quantised folder."""
    return _kind_and_bytes(weights, name)[0]


def stays_half(weights: Weights, name: str, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell if a matrix stays in BF16 or F16; kernels convert it at every use, `RUN` of its `columns` at a time."""
    if dtype is not torch.float32 or device.type != "cpu" or weights.stored_type(name) not in HALF_TYPES:
        return False
    is_matrix, is_alone = len(weights.shape(name)) == 2, weights.slots[name].must_equal is None
    return is_matrix and columns % RUN == 0 and is_alone and not weights.is_changed(name)


def block_size(weights: Weights, name: str) -> int:
    """Return the number of adjacent columns that a rank's cut must not split: those of a scale, or all if reordered."""
    kind, matrix = kind_of(weights, name), weights.as_stored(name)
    if isinstance(kind, GGMLType):
        return BLOCK_SIZES[kind][0]
    return weights.shape(name)[-1] if group_order(matrix) is not None else max(RUN, _scale_columns(matrix))


def packed_bytes(weights: Weights, name: str) -> int:
    """Return an upper bound of the bytes of a packed weight."""
    return _kind_and_bytes(weights, name)[1]


def _kind_and_bytes(weights: Weights, name: str) -> tuple[Kind | None, int]:
    """Return kind and bytes of a weight, cached for each opened file or folder."""
    cached = _KIND_CACHE.setdefault(weights.source, {})
    if name not in cached:
        matrices = [in_group_order(matrix) for matrix in weights.all_stored(name)]
        kind = _find_kind(matrices)
        cached[name] = kind, 0 if kind is None else _count_bytes(matrices[0], kind, prod(weights.shape(name)))
    return cached[name]


def _find_kind(matrices: Sequence[Packed]) -> Kind | None:
    """Return the common kind of a weight's matrices, one or one per expert; None: they are decoded."""
    if not isinstance(matrices[0], QuantisedMatrix):
        kind = matrices[0].ggml_type
        return kind if isinstance(kind, GGMLType) and kind in PACKERS else None
    kinds = {_code_table(matrix) for matrix in matrices}
    return kinds.pop() if len(kinds) == 1 else None


def _count_bytes(matrix: Packed, kind: Kind, elements: int) -> int:
    if isinstance(kind, GGMLType):
        size, n_bytes = BLOCK_SIZES[kind]
        return elements // size * n_bytes
    scales = 2 * _SCALE_BYTES * elements // _scale_columns(matrix)  # scales, and zero points or minima
    return (elements // 2 if kind.name == "TABLE_4" else elements) + scales


def pack_file_blocks(
    matrices: Sequence[Packed], kind: GGMLType, interleaved_heads: int, empty: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Split one or several matrices of a GGUF file into fields, as `packing.pack` does.

    `interleaved_heads`: heads whose rows are interleaved in the file, or 0. `empty` allocates. Few rows are packed at
    a time, because the C library keeps the memory of large temporary arrays, up to the size of the model.
    """
    n_rows, n_blocks = sum(len(m.by_row) for m in matrices), matrices[0].by_row.shape[1] // BLOCK_SIZES[kind][1]
    fields = {
        name: empty(n_rows, n_blocks * field.shape[1], dtype=field.dtype) for name, field in _empty_block(kind).items()
    }
    compiled = _compiled_pass() if kind in PACKERS else None
    for rows, blocks in _iterate_blocks(matrices, interleaved_heads):
        row_fields = {name: field[rows] for name, field in fields.items()}
        if compiled is not None:
            pack_blocks(blocks, kind, row_fields, compiled)
            continue
        for name, packed in pack(torch.from_numpy(np.require(blocks, requirements="W")), kind).items():
            row_fields[name].copy_(packed)
    return fields


@cache
def _empty_block(kind: GGMLType) -> dict[str, Tensor]:
    """Return the fields of one block of zeros, for their shapes and dtypes."""
    return pack(torch.zeros(1, BLOCK_SIZES[kind][1], dtype=torch.uint8), kind)


def _iterate_blocks(matrices: Sequence[Packed], interleaved_heads: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield about `_BLOCKS_AT_ONCE` bytes of a matrix at a time, with their row slice in all matrices."""
    first_row = 0
    for by_row in (matrix.by_row for matrix in matrices):
        order = undo_interleave(np.arange(len(by_row)), interleaved_heads) if interleaved_heads else None
        step = max(1, _BLOCKS_AT_ONCE // by_row.shape[1])
        for start in range(0, len(by_row), step):
            rows = slice(start, min(start + step, len(by_row)))
            yield slice(first_row + start, first_row + rows.stop), by_row[rows if order is None else order[rows]]
        first_row += len(by_row)


def pack_stored(matrix: QuantisedMatrix, kind: Table, empty: Callable[..., Tensor] = torch.empty) -> dict[str, Tensor]:
    """Split a matrix in group order into fields, as `packing.pack` does; `empty` allocates the codes."""
    recipe, size = matrix.recipe, _scale_columns(matrix)
    fields = {"codes": _packed_codes(matrix, kind, empty), "d": _read_groups(matrix, recipe.scale, size)}
    if recipe.minimum is not None:
        fields["minimum"] = _read_groups(matrix, recipe.minimum, size)
    if kind.has_zeros and recipe.zero is not None:
        fields["zero"] = _read_groups(matrix, recipe.zero, size)
    return fields


def in_group_order(matrix: Packed) -> Packed:
    """Move columns that share a scale next to each other, and record the group size; other matrices stay."""
    if not isinstance(matrix, QuantisedMatrix) or not callable(group := matrix.recipe.group):
        return matrix
    recipe, group_size = matrix.recipe, _group(matrix)
    if group_size is not None:
        return replace(matrix, recipe=replace(recipe, group=group_size))
    order = group_order(matrix)
    if order is None:
        return matrix

    def codes(parts: Parts, rows: Rows) -> np.ndarray:
        return recipe.codes(parts, rows)[:, order]

    group_size = int(np.bincount(group(matrix.parts))[0])
    return replace(matrix, recipe=replace(recipe, codes=codes, group=group_size))


def group_order(matrix: Packed) -> Int[np.ndarray, " in"] | None:
    """Return the new order of columns, for a matrix with groups of equal size but scattered columns; else None."""
    if not isinstance(matrix, QuantisedMatrix) or not callable(matrix.recipe.group) or _group(matrix) is not None:
        return None
    group_index = matrix.recipe.group(matrix.parts)
    counts = np.bincount(group_index)
    return np.argsort(group_index, kind="stable") if (counts == counts[0]).all() else None


def _code_table(matrix: Packed) -> Table | None:
    """Return the table by which kernels decode the codes of a matrix; None if they cannot."""
    assert isinstance(matrix, QuantisedMatrix)
    recipe, code_values = matrix.recipe, matrix.values
    if matrix.shape[1] % RUN or _group(matrix) is None or _scale_columns(matrix) % _HALF_RUN:
        return None
    zero = None if recipe.zero is None else _group_numbers(matrix, recipe.zero)
    has_zeros = zero is not None and bool(zero.min() != zero.max())
    if zero is not None and not has_zeros:
        code_values = code_values - zero.flat[0]
    if has_zeros and recipe.minimum is not None:
        return None
    name = "TABLE_4" if len(code_values) <= TABLES["TABLE_4"] else "TABLE_8"
    padded = code_values[0] + np.arange(TABLES[name], dtype=np.float32)  # so integers stay a sequence, decoded faster
    padded[: len(code_values)] = code_values
    divisor = None if recipe.divisor is None else float(_group_numbers(matrix, recipe.divisor)[0, 0])
    factor = None if recipe.factor is None else float(recipe.factor)
    return Table(name, padded.tobytes(), has_zeros, factor, divisor)


def _scale_columns(matrix: Packed) -> int:
    """Return the columns per scale in the packed matrix: the folder's if a multiple of 32, else 16 or its divisor."""
    size = _group(matrix) if isinstance(matrix, QuantisedMatrix) else None
    assert size is not None
    return size if size % RUN == 0 else gcd(size, _HALF_RUN)


def _group(matrix: QuantisedMatrix) -> int | None:
    """Return the columns per scale, if these are adjacent and all groups have one size; else None."""
    group, n_in = matrix.recipe.group, matrix.shape[1]
    if callable(group):
        group_index = group(matrix.parts)
        size = int(np.argmax(group_index != group_index[0])) or n_in
        return size if np.array_equal(group_index, np.arange(n_in) // size) and n_in % size == 0 else None
    return gcd(group, n_in)  # if the last group is shorter: smaller groups of one size, which repeat scales


def _group_numbers(matrix: QuantisedMatrix, reader: Reader) -> Float32[np.ndarray, "rows groups"]:
    return reader(matrix.parts, matrix.stored(slice(None)))


def _read_groups(matrix: QuantisedMatrix, reader: Reader, size: int) -> Float32[Tensor, "rows groups"]:
    """Read one number per `size` columns; `size` divides the group size."""
    numbers, (n_rows, n_in) = _group_numbers(matrix, reader), matrix.shape
    group = matrix.recipe.group if isinstance(matrix.recipe.group, int) else _group(matrix)
    assert group is not None
    if numbers.shape[1] > 1 and group != size:
        numbers = np.repeat(numbers, group // size, axis=1)
    return torch.from_numpy(np.array(np.broadcast_to(numbers[:, : n_in // size], (n_rows, n_in // size)), np.float32))


def _packed_codes(matrix: QuantisedMatrix, kind: Table, empty: Callable[..., Tensor]) -> Tensor:
    """Pack the codes: in C if it knows their order, else some rows at a time."""
    codes = matrix.recipe.codes
    if isinstance(codes, Unpacker) and matrix.own_rows is None:
        compiled = _compiled_pass()
        packed = None if compiled is None else packed_codes(codes, matrix.parts[codes.part], compiled, empty)
        if packed is not None:
            return packed
    width = matrix.shape[1] // (2 if kind.name == "TABLE_4" else 1)
    packed = empty(matrix.shape[0], width, dtype=torch.uint8)
    for rows, codes in _iterate_codes(matrix):
        if kind.name == "TABLE_4":
            packed[rows] = join_four_bits(torch.from_numpy(np.require(codes, requirements=["C", "W"])))
        else:
            packed.numpy()[rows] = codes
    return packed


@cache
def _compiled_pass() -> ctypes.CDLL | None:
    """Load the library that packs codes; None without a compiler (`library` would warn, but here NumPy is enough)."""
    return library() if find_compiler() else None


def _iterate_codes(matrix: QuantisedMatrix) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield a slice of rows and their codes, about `_AT_ONCE` elements at a time."""
    n_out, n_in = matrix.shape
    step = max(32, _AT_ONCE // n_in // 32 * 32)  # whole words of formats that pack along the rows
    for start in range(0, n_out, step):
        rows = slice(start, min(start + step, n_out))
        yield rows, matrix.recipe.codes(matrix.parts, matrix.stored(rows))
