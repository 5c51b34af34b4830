"""Codes of a quantised folder or a GGUF file, packed anew by `cpu_packing.c` from the bytes of the file.

The references are `stored_kinds` and `packing.pack`, which have each code in a byte of its own meanwhile, and so take
several times as long.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.matrix import CodesOf, StoredPart
from llorch.pytorch.kernels.cpu.quantised import KINDS
from llorch.pytorch.kernels.packing import Fields

ORDERS = {"rows": 0, "high first": 1, "columns": 2, "awq": 3}  # `order` in cpu_packing.c
_FIELDS = ("codes", "upper", "scales", "d", "dmin")  # of blocks, as cpu_packing.c wants them


def packed_codes(
    codes: CodesOf, part: StoredPart, library: ctypes.CDLL, empty: Callable[..., Tensor] = torch.empty
) -> UInt8[Tensor, "out bytes"] | None:
    """Pack the codes of a whole matrix; None for those that are not moved here, such as codes of 3 bits.

    A part that holds more than the codes, such as padding, or less, is not moved here either. `empty` makes the tensor.
    """
    n_out, n_in = codes.shape
    if codes.bits not in (4, 8) or part.raw.nbytes != n_out * n_in * codes.bits // 8:
        return None
    packed = empty(n_out, n_in * codes.bits // 8, dtype=torch.uint8)
    if codes.bits == 8 and codes.order == "rows":
        packed.numpy()[...] = codes({codes.part: part}, slice(0, n_out))
    else:
        stored = np.ascontiguousarray(part.raw)
        order = ORDERS[codes.order]
        library.llorch_pack_codes(order, codes.bits, stored.ctypes.data, packed.data_ptr(), n_out, n_in)
    return packed


def pack_blocks(
    blocks: UInt8[np.ndarray, "out row_bytes"], ggml_type: GGMLType, fields: Fields, library: ctypes.CDLL
) -> None:
    """Write the fields of some rows of blocks, as `packing.pack` makes them; each field has these rows."""
    stored = np.ascontiguousarray(blocks)
    assert all(field.is_contiguous() and len(field) == len(stored) for field in fields.values())
    places = (fields[name].data_ptr() if name in fields else None for name in _FIELDS)
    library.llorch_pack_blocks(KINDS[ggml_type], stored.ctypes.data, *places, stored.size // BLOCK_SIZES[ggml_type][1])
