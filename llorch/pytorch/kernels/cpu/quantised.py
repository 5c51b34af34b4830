"""Products with a packed matrix on the CPU: few rows directly from the blocks, many rows by decoding tiles.

The layouts are those of `llorch.pytorch.kernels.packing`, whose `decode` gives the same numbers bit for bit.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from llorch.files.quantised.fields import Table, shared_by_rows
from llorch.ops.compiled.products import FEW, KINDS
from llorch.pytorch.kernels.cpu.layer import HALF, pointer
from llorch.pytorch.kernels.cpu.linear import TILE, product
from llorch.pytorch.kernels.packing import Fields, Kind, arrays_of
from llorch.pytorch.kernels.quantised_linear import FrozenProduct, PackedMatrix, multiply_tiles, multiply_tiles_back

_OFFSETS = ("zero", "minimum")  # a table has at most one of these fields


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
        self._kind = KINDS[ggml_type.name]
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
            return self.multiply_by_tiles(x)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        sizes = rows, self.out_features, self.in_features
        multiply = self.library.llorch_fixed_product if self.fixed else self.library.llorch_product
        if multiply(*self.matrix_of(x.dtype), x.data_ptr(), pointer(self.bias), y.data_ptr(), *sizes):
            raise MemoryError(f"linear: cannot allocate memory for {rows} rows")
        return y

    def multiply_by_tiles(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply by the decoded matrix in the dtype of `x`, for any number of rows."""
        return multiply_tiles(x, self._tiles(x), self.out_features, self.bias, product)

    def multiply_back(self, grad: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows in"]:
        """Compute grad @ matrix, the gradient of the input."""
        return multiply_tiles_back(grad, self._tiles(grad), product)

    def part(self, rows: slice) -> "CpuQuantisedLinear":
        """Return a view of some rows, without a bias."""
        fields = {name: field[rows] for name, field in self.fields.items()}
        return CpuQuantisedLinear(fields, self.ggml_type, None, self.library, shared=self.shared)

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
        codes = buffers["blocks" if "blocks" in buffers else "codes"]
        if codes is not self._pointers_codes:
            offset = next((buffers[name] for name in _OFFSETS if name in buffers), None)
            self._pointers = tuple(map(pointer, (codes, buffers.get("d"), self.shared, offset)))
            self._pointers_codes = codes
        return self._kind, *self._pointers, HALF[dtype]


class TrainedQuantisedLinear(CpuQuantisedLinear):
    """Packed linear layer with the interface of `nn.Linear` and a gradient for its input."""

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply by the decoded matrix in the dtype of `x`, for any number of rows."""
        y: Any = FrozenProduct.apply(x, self.multiply_by_tiles, self.multiply_back)  # no view: the loss overwrites it
        return y
