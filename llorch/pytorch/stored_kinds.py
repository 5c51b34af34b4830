"""Kind (format) in which torch keeps a packed weight, and the fields of a matrix from a file or folder.

A packed matrix keeps its codes and scales; each of its fields is a tensor, see `kernels.packing`. A matrix of a GGUF
file keeps its type if the device has kernels for it. A matrix of a quantised folder becomes a `Table`, see
`llorch.files.quantised.fields`. It is decoded when it is loaded if it has no table, or if experts have different ones.

A matrix in BF16 or F16, such as the embedding of a quantised folder, stays in 16 bits next to packed matrices if the
CPU computes in float32. In float32 it would take twice the memory, and its product twice the time. The numbers are
equal; only products of a few rows have another order of sums, except in mode "reproducible".
"""

from collections.abc import Callable, MutableMapping, Sequence
from math import prod
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from llorch.files import Weights
from llorch.files.packed import Packed
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.blocks import RUN
from llorch.files.quantised.fields import (
    Table,
    code_table,
    count_bytes,
    group_order,
    pack_table,
    scale_columns,
)  # fmt: skip
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import undo_interleave
from llorch.pytorch.kernels.packing import CPU_BLOCK_TYPES, HALF_TYPES, PACKERS, Kind

_KIND_CACHE: MutableMapping[object, dict[str, tuple[Kind | None, int]]] = WeakKeyDictionary()  # by opened file


def kind_of(weights: Weights, name: str, device_type: str = "cpu") -> Kind | None:
    """Return the kind in which torch keeps a weight; None: decoded. Reads zero points of a quantised folder."""
    kind = _kind_and_bytes(weights, name)[0]
    return None if device_type == "cuda" and isinstance(kind, GGMLType) and kind not in PACKERS else kind


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
    assert isinstance(matrix, QuantisedMatrix)
    return weights.shape(name)[-1] if group_order(matrix) is not None else max(RUN, scale_columns(matrix))


def packed_bytes(weights: Weights, name: str) -> int:
    """Return an upper bound of the bytes of a packed weight."""
    return _kind_and_bytes(weights, name)[1]


def _kind_and_bytes(weights: Weights, name: str) -> tuple[Kind | None, int]:
    """Return kind and bytes of a weight, cached for each opened file or folder."""
    cached = _KIND_CACHE.setdefault(weights.source, {})
    if name not in cached:
        matrices = weights.all_stored(name)
        kind = _find_kind(matrices)
        cached[name] = kind, 0 if kind is None else _count_bytes(matrices[0], kind, prod(weights.shape(name)))
    return cached[name]


def _find_kind(matrices: Sequence[Packed]) -> Kind | None:
    """Return the common kind of a weight's matrices, one or one per expert; None: they are decoded."""
    if not isinstance(matrices[0], QuantisedMatrix):
        kind = matrices[0].ggml_type
        return kind if isinstance(kind, GGMLType) and kind in CPU_BLOCK_TYPES else None
    kinds = {code_table(matrix) for matrix in matrices}
    return kinds.pop() if len(kinds) == 1 else None


def _count_bytes(matrix: Packed, kind: Kind, elements: int) -> int:
    if isinstance(kind, GGMLType):
        size, n_bytes = BLOCK_SIZES[kind]
        return elements // size * n_bytes
    assert isinstance(matrix, QuantisedMatrix)
    return count_bytes(matrix, kind, elements)


def read_blocks(matrices: Sequence[Packed], interleaved_heads: int, empty: Callable[..., Tensor]) -> Tensor:
    """Copy the rows of one or several matrices of a GGUF file, in the model's order; `empty` allocates.

    `interleaved_heads`: heads whose rows are interleaved in the file, or 0.
    """
    n_bytes = matrices[0].by_row.shape[1]
    blocks = empty(sum(matrix.shape[0] for matrix in matrices), n_bytes, dtype=torch.uint8)
    first_row = 0
    for by_row in (matrix.by_row for matrix in matrices):
        order = undo_interleave(np.arange(len(by_row)), interleaved_heads) if interleaved_heads else slice(None)
        blocks[first_row : first_row + len(by_row)].numpy()[...] = by_row[order]
        first_row += len(by_row)
    return blocks


def pack_stored(matrix: QuantisedMatrix, kind: Table, empty: Callable[..., Tensor] = torch.empty) -> dict[str, Tensor]:
    """Split a matrix in group order into fields; `empty` allocates the codes."""
    fields = pack_table(matrix, kind, lambda shape, _: empty(*shape, dtype=torch.uint8).numpy())
    return {name: torch.from_numpy(field) for name, field in fields.items()}
