"""The kind of packed matrix that torch keeps a stored weight as, and the fields of a file's or folder's matrix.

A matrix of a GGUF file stays in its type if `PACKERS` has that type. A matrix of a quantised folder becomes a `Table`,
with 4 bits for each code if it has at most 16 different codes, else with 8 bits. Decoding applies the operations of
`QuantisedMatrix.decode_rows` in the same order, so both have the same bits.

These matrices are decoded when they are loaded:

    rows whose length 32 does not divide
    scales whose groups have different sizes, or sizes that 16 does not divide
    experts with different tables, or different numbers that apply last

A matrix in BF16 or F16, such as the embedding of a quantised folder, stays so beside packed matrices where the CPU
computes in float32. In float32 it would take twice the memory, and a product with it twice the time. Its numbers are
the same; only products of a few rows are summed in another order, except in mode "reproducible".
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
from llorch.files.quantised.matrix import CodesOf, Parts, QuantisedMatrix, Reader
from llorch.files.tensor_names import undo_interleave
from llorch.pytorch.kernels.cpu.library import find_compiler, library
from llorch.pytorch.kernels.cpu.quantised import pack_blocks, packed_codes
from llorch.pytorch.kernels.packing import HALF_TYPES, PACKERS, RUN, TABLES, Kind, Table, join_four_bits, pack

_HALF_RUN = 16  # columns of the smallest group that kernels know
_SCALE_BYTES = 4
_AT_ONCE = 1 << 22  # elements whose codes are unpacked in one go
_BLOCKS_AT_ONCE = 1 << 18  # bytes of blocks that are taken apart in one go: they stay in the processor cache
_KNOWN: MutableMapping[object, dict[str, tuple[Kind | None, int]]] = WeakKeyDictionary()  # by the opened file


def kind_of(weights: Weights, name: str) -> Kind | None:
    """Find the kind that torch keeps a weight as; None: it is decoded. Zero points of a quantised folder are read."""
    return _known(weights, name)[0]


def stays_half(weights: Weights, name: str, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a matrix stays in BF16 or F16, for kernels that widen whole runs of its `columns` at every use."""
    if dtype is not torch.float32 or device.type != "cpu" or weights.stored_type(name) not in HALF_TYPES:
        return False
    is_matrix, is_alone = len(weights.shape(name)) == 2, weights.slots[name].must_equal is None
    return is_matrix and columns % RUN == 0 and is_alone and not weights.is_changed(name)


def block_size(weights: Weights, name: str) -> int:
    """Count the columns of a packed weight that stay together: those of one scale, or all if they are reordered."""
    kind, stored = kind_of(weights, name), weights.as_stored(name)
    if isinstance(kind, GGMLType):
        return BLOCK_SIZES[kind][0]
    return weights.shape(name)[-1] if group_order(stored) is not None else max(RUN, _scale_columns(stored))


def packed_bytes(weights: Weights, name: str) -> int:
    """Predict the bytes of a weight that is kept packed, at most."""
    return _known(weights, name)[1]


def _known(weights: Weights, name: str) -> tuple[Kind | None, int]:
    """Return kind and bytes of a weight, found once for each opened file or folder."""
    known = _KNOWN.setdefault(weights.source, {})
    if name not in known:
        stored = [in_group_order(one) for one in weights.all_stored(name)]
        kind = _find_kind(stored)
        known[name] = kind, 0 if kind is None else _count_bytes(stored[0], kind, prod(weights.shape(name)))
    return known[name]


def _find_kind(stored: Sequence[Packed]) -> Kind | None:
    if not isinstance(stored[0], QuantisedMatrix):
        kind = stored[0].ggml_type
        return kind if isinstance(kind, GGMLType) and kind in PACKERS else None
    kinds = {_code_table(one) for one in stored}
    return kinds.pop() if len(kinds) == 1 else None


def _count_bytes(stored: Packed, kind: Kind, elements: int) -> int:
    if isinstance(kind, GGMLType):
        size, n_bytes = BLOCK_SIZES[kind]
        return elements // size * n_bytes
    scales = 2 * _SCALE_BYTES * elements // _scale_columns(stored)
    return (elements // 2 if kind.name == "TABLE_4" else elements) + scales


def pack_file_blocks(
    stored: Sequence[Packed], kind: GGMLType, interleaved_heads: int, empty: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Split one matrix of a GGUF file, or one after the other, into fields, as `packing.pack` does.

    `interleaved_heads`: heads whose rows are interleaved in the file, or 0. `empty` makes the tensors. Few rows are
    taken apart at once: the C library keeps many large temporary arrays, up to the size of the model once more.
    """
    n_rows, n_blocks = sum(len(one.by_row) for one in stored), stored[0].by_row.shape[1] // BLOCK_SIZES[kind][1]
    fields = {
        name: empty(n_rows, n_blocks * field.shape[1], dtype=field.dtype) for name, field in _empty_block(kind).items()
    }
    compiled = _compiled_pass() if kind in PACKERS else None
    for rows, blocks in _some_rows(stored, interleaved_heads):
        places = {name: field[rows] for name, field in fields.items()}
        if compiled is not None:
            pack_blocks(blocks, kind, places, compiled)
            continue
        for name, part in pack(torch.from_numpy(np.require(blocks, requirements="W")), kind).items():
            places[name].copy_(part)
    return fields


@cache
def _empty_block(kind: GGMLType) -> dict[str, Tensor]:
    """Return the fields of one block of zeros, whose shapes and dtypes those of a matrix follow from."""
    return pack(torch.zeros(1, BLOCK_SIZES[kind][1], dtype=torch.uint8), kind)


def _some_rows(stored: Sequence[Packed], interleaved_heads: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield about `_BLOCKS_AT_ONCE` bytes of one matrix at a time, and which rows they are of all matrices together."""
    before = 0
    for by_row in (one.by_row for one in stored):
        order = undo_interleave(np.arange(len(by_row)), interleaved_heads) if interleaved_heads else None
        step = max(1, _BLOCKS_AT_ONCE // by_row.shape[1])
        for start in range(0, len(by_row), step):
            rows = slice(start, min(start + step, len(by_row)))
            yield slice(before + start, before + rows.stop), by_row[rows if order is None else order[rows]]
        before += len(by_row)


def pack_stored(matrix: QuantisedMatrix, kind: Table, empty: Callable[..., Tensor] = torch.empty) -> dict[str, Tensor]:
    """Split a matrix in group order into fields, as `packing.pack` does; `empty` makes the tensor of the codes."""
    recipe, size = matrix.recipe, _scale_columns(matrix)
    fields = {"codes": _packed_codes(matrix, kind, empty), "d": _of_groups(matrix, recipe.scale, size)}
    if recipe.minimum is not None:
        fields["minimum"] = _of_groups(matrix, recipe.minimum, size)
    if kind.has_zeros and recipe.zero is not None:
        fields["zero"] = _of_groups(matrix, recipe.zero, size)
    return fields


def in_group_order(matrix: Packed) -> Packed:
    """Put columns that share a scale next to each other, and note how many share one."""
    if not isinstance(matrix, QuantisedMatrix) or not callable(group := matrix.recipe.group):
        return matrix
    recipe, size = matrix.recipe, _group(matrix)
    if size is not None:
        return replace(matrix, recipe=replace(recipe, group=size))
    order = group_order(matrix)
    if order is None:
        return matrix

    def codes(parts: Parts, rows: Rows) -> np.ndarray:
        return recipe.codes(parts, rows)[:, order]

    size = int(np.bincount(group(matrix.parts))[0])
    return replace(matrix, recipe=replace(recipe, codes=codes, group=size))


def group_order(matrix: Packed) -> Int[np.ndarray, " in"] | None:
    """Give the new order of the columns, for a matrix whose groups have one size but not neighbouring columns."""
    if not isinstance(matrix, QuantisedMatrix) or not callable(matrix.recipe.group) or _group(matrix) is not None:
        return None
    numbers = matrix.recipe.group(matrix.parts)
    counts = np.bincount(numbers)
    return np.argsort(numbers, kind="stable") if (counts == counts[0]).all() else None


def _code_table(matrix: Packed) -> Table | None:
    """Describe how kernels decode the codes of a matrix by a table; None if they cannot."""
    assert isinstance(matrix, QuantisedMatrix)
    recipe, values = matrix.recipe, matrix.values
    if matrix.shape[1] % RUN or _group(matrix) is None or _scale_columns(matrix) % _HALF_RUN:
        return None
    zero = None if recipe.zero is None else _group_numbers(matrix, recipe.zero)
    has_zeros = zero is not None and bool(zero.min() != zero.max())
    if zero is not None and not has_zeros:
        values = values - zero.flat[0]
    if has_zeros and recipe.minimum is not None:
        return None
    name = "TABLE_4" if len(values) <= TABLES["TABLE_4"] else "TABLE_8"
    padded = values[0] + np.arange(TABLES[name], dtype=np.float32)  # unused codes continue a row of integers
    padded[: len(values)] = values
    divisor = None if recipe.divisor is None else float(_group_numbers(matrix, recipe.divisor)[0, 0])
    factor = None if recipe.factor is None else float(recipe.factor)
    return Table(name, padded.tobytes(), has_zeros, factor, divisor)


def _scale_columns(matrix: Packed) -> int:
    """Count the columns that share a scale in the packed matrix: 16, or a multiple of 32 where the folder has that."""
    size = _group(matrix) if isinstance(matrix, QuantisedMatrix) else None
    assert size is not None
    return size if size % RUN == 0 else gcd(size, _HALF_RUN)


def _group(matrix: QuantisedMatrix) -> int | None:
    """Count the columns that share a scale, where these are neighbours and all groups have one size; else None."""
    group, n_in = matrix.recipe.group, matrix.shape[1]
    if callable(group):
        numbers = group(matrix.parts)
        size = int(np.argmax(numbers != numbers[0])) or n_in
        return size if np.array_equal(numbers, np.arange(n_in) // size) and n_in % size == 0 else None
    return gcd(group, n_in)  # a last group that is shorter: in parts that divide both


def _group_numbers(matrix: QuantisedMatrix, reader: Reader) -> Float32[np.ndarray, "rows groups"]:
    return reader(matrix.parts, matrix.stored(slice(None)))


def _of_groups(matrix: QuantisedMatrix, reader: Reader, size: int) -> Float32[Tensor, "rows groups"]:
    """Read the numbers of every `size` columns, which divides the columns of a group."""
    numbers, (n_rows, n_in) = _group_numbers(matrix, reader), matrix.shape
    group = matrix.recipe.group if isinstance(matrix.recipe.group, int) else _group(matrix)
    assert group is not None
    if numbers.shape[1] > 1 and group != size:
        numbers = np.repeat(numbers, group // size, axis=1)
    return torch.from_numpy(np.array(np.broadcast_to(numbers[:, : n_in // size], (n_rows, n_in // size)), np.float32))


def _packed_codes(matrix: QuantisedMatrix, kind: Table, empty: Callable[..., Tensor]) -> Tensor:
    """Pack the codes: with the compiled pass where it knows their order, else some rows at a time."""
    codes = matrix.recipe.codes
    if isinstance(codes, CodesOf) and matrix.own_rows is None:
        compiled = _compiled_pass()
        packed = None if compiled is None else packed_codes(codes, matrix.parts[codes.part], compiled, empty)
        if packed is not None:
            return packed
    width = matrix.shape[1] // (2 if kind.name == "TABLE_4" else 1)
    packed = empty(matrix.shape[0], width, dtype=torch.uint8)
    for rows, codes in _codes_in_parts(matrix):
        if kind.name == "TABLE_4":
            packed[rows] = join_four_bits(torch.from_numpy(np.require(codes, requirements=["C", "W"])))
        else:
            packed.numpy()[rows] = codes
    return packed


@cache
def _compiled_pass() -> ctypes.CDLL | None:
    """Load the library that packs codes; None where no compiler is installed, without the warning of `library`."""
    return library() if find_compiler() else None


def _codes_in_parts(matrix: QuantisedMatrix) -> Iterator[tuple[slice, np.ndarray]]:
    n_out, n_in = matrix.shape
    step = max(32, _AT_ONCE // n_in // 32 * 32)  # whole words of formats that pack along the rows
    for start in range(0, n_out, step):
        rows = slice(start, min(start + step, n_out))
        yield rows, matrix.recipe.codes(matrix.parts, matrix.stored(rows))
