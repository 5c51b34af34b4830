"""Products with a packed matrix on the CPU: few rows directly from the blocks, many rows by decoding tiles.

The layouts are those of `llorch.pytorch.kernels.packing`, whose `decode` gives the same numbers bit for bit.
`packing.c` repacks the blocks of a GGUF file from its bytes. The reference is `packing.pack`, which uses one byte per
code in between and so takes several times as long.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.fields import Table, shared_by_rows
from llorch.ops.compiled.products import FEW
from llorch.ops.compiled.products import KINDS as TABLE_KINDS
from llorch.pytorch.kernels.cpu.layer import pointer
from llorch.pytorch.kernels.cpu.linear import TILE, product
from llorch.pytorch.kernels.packing import Fields, Kind, arrays_of
from llorch.pytorch.kernels.quantised_linear import FrozenProduct, PackedMatrix

KINDS = {  # `kind` in products.c
    GGMLType.BF16: 1, GGMLType.Q8_0: 2, GGMLType.Q4_0: 3, GGMLType.Q4_K: 4, GGMLType.Q6_K: 5, GGMLType.F16: 8,
}  # fmt: skip
HALF = {torch.float32: 0, torch.bfloat16: 1}  # `half` in the C files: the dtype of inputs and outputs
_EXTRA_FIELDS = ("upper", "dmin", "zero", "minimum")  # each kind has at most one of these fields


class CpuQuantisedLinear(PackedMatrix):
    """Packed linear layer with the interface of `nn.Linear`, for inference: it does not support backward."""

    def __init__(
        self, fields: Fields, ggml_type: Kind, bias: Tensor | None, library: ctypes.CDLL, *, fixed: bool = False,
        shared: Float32[Tensor, " numbers"] | None = None,
    ) -> None:  # fmt: skip
        """Take over the fields of a packed layer, or of an embedding with tied fields.

        `fixed`: any number of rows is multiplied by the decoded matrix, so that no row depends on other rows.
        `shared`: see `shared_by_rows`; passed if these rows are part of a matrix whose array exists.
        """
        super().__init__(fields, ggml_type)
        self.bias, self.fixed = bias, fixed
        self.library = library
        self._kind = TABLE_KINDS[ggml_type.name] if isinstance(ggml_type, Table) else KINDS[ggml_type]
        if shared is None and isinstance(ggml_type, Table):
            shared = torch.from_numpy(shared_by_rows(ggml_type, arrays_of(fields)))
        self.shared = shared
        self._pointers: tuple[int | None, ...] = ()
        self._pointers_codes: object = None

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in the dtype of `x`; sums are float32 and rounded once."""
        x = x.contiguous()
        rows = x.numel() // self.in_features
        if rows > FEW and not self.fixed:
            return self._multiply_by_tiles(x.view(rows, -1)).view(*x.shape[:-1], self.out_features)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        sizes = rows, self.out_features, self.in_features
        multiply = self.library.llorch_fixed_product if self.fixed else self.library.llorch_product
        if multiply(*self.matrix_of(x.dtype), x.data_ptr(), pointer(self.bias), y.data_ptr(), *sizes):
            raise MemoryError(f"linear: cannot allocate memory for {rows} rows")
        return y

    def _multiply_by_tiles(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        bias = self.bias
        products = [product(x, tile, None if bias is None else bias[rows]) for rows, tile in self._tiles(x)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def _tiles(self, x: Tensor) -> Iterator[tuple[slice, Float[Tensor, "rows in"]]]:
        """Yield tiles of rows, decoded to the dtype of `x`. Each tile overwrites the previous tile."""
        step = max(1, TILE // self.in_features)
        buffer = x.new_empty(min(step, self.out_features), self.in_features)
        for start in range(0, self.out_features, step):
            tile = buffer[: self.out_features - start]
            sizes = start, len(tile), self.in_features
            self.library.llorch_decode(*self.matrix_of(x.dtype), tile.data_ptr(), *sizes)
            yield slice(start, start + len(tile)), tile

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the matrix arguments of compiled functions; pointers are cached until fields are moved."""
        buffers = self._buffers
        if buffers["codes"] is not self._pointers_codes:
            extra_field = next((buffers[name] for name in _EXTRA_FIELDS if name in buffers), None)
            scales = buffers.get("scales") if self.shared is None else self.shared
            self._pointers = tuple(map(pointer, (buffers["codes"], buffers.get("d"), scales, extra_field)))
            self._pointers_codes = buffers["codes"]
        return self._kind, *self._pointers, HALF[dtype]

    def struct_fields(self) -> tuple[int | None, ...]:
        """Return the fields of the matrix struct in `block.c`."""
        kind, *pointers, _ = self.matrix_of(torch.float32)
        return *pointers, pointer(self.bias), kind, self.out_features, self.in_features


class TrainedQuantisedLinear(CpuQuantisedLinear):
    """Packed linear layer with the interface of `nn.Linear` and a gradient for its input."""

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply by the decoded matrix in the dtype of `x`, for any number of rows."""
        y: Any = FrozenProduct.apply(x.reshape(-1, self.in_features), self._multiply_by_tiles, self.multiply_back)
        return y.view(*x.shape[:-1], self.out_features)

    def multiply_back(self, grad: Float[Tensor, "rows out"]) -> Float[Tensor, "rows in"]:
        """Compute grad @ matrix, the gradient of the input; the products of the tiles are added in float32."""
        total = grad.new_zeros(len(grad), self.in_features, dtype=torch.float32)
        for rows, tile in self._tiles(grad):
            total += product(grad[:, rows].contiguous(), tile.T, None)
        return total.to(grad.dtype)


_FIELDS = ("codes", "upper", "scales", "d", "dmin")  # of blocks, in the order of packing.c


def pack_blocks(
    blocks: UInt8[np.ndarray, "out row_bytes"], ggml_type: GGMLType, fields: Fields, library: ctypes.CDLL
) -> None:
    """Write the fields of some rows of blocks, as `packing.pack` makes them; each field has these rows only."""
    rows = np.ascontiguousarray(blocks)
    assert all(field.is_contiguous() and len(field) == len(rows) for field in fields.values())
    pointers = (fields[name].data_ptr() if name in fields else None for name in _FIELDS)
    library.llorch_pack_blocks(KINDS[ggml_type], rows.ctypes.data, *pointers, rows.size // BLOCK_SIZES[ggml_type][1])
