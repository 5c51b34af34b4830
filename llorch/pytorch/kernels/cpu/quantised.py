"""Products with a packed matrix on the CPU: few rows directly from the blocks, many rows by decoding tiles.

The layouts are those of `llorch.pytorch.kernels.packing`, whose `decode` gives the same numbers bit for bit.
`packing.c` repacks the codes of a quantised folder or GGUF file from the bytes of the file. The references are
`stored_kinds` and `packing.pack`, which use one byte per code in between and so take several times as long.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.files.quantised.codes import E4M3, INT8
from llorch.files.quantised.matrix import StoredPart, Unpacker
from llorch.pytorch.kernels.cpu.layer import pointer
from llorch.pytorch.kernels.cpu.linear import TILE, product
from llorch.pytorch.kernels.packing import RUN, TABLES, Fields, Kind, Table, values_of, width
from llorch.pytorch.kernels.quantised_linear import FrozenProduct, PackedMatrix

KINDS = {  # `kind` in products.c
    GGMLType.BF16: 1, GGMLType.Q8_0: 2, GGMLType.Q4_0: 3, GGMLType.Q4_K: 4, GGMLType.Q6_K: 5, GGMLType.F16: 8,
}  # fmt: skip
TABLE_KINDS = {"TABLE_4": 6, "TABLE_8": 7}
_LOOK_UP, _SIGNED, _E4M3, _EVEN, _SHORT, _SHIFTED = range(6)  # `way` to decode in products.c
HALF = {torch.float32: 0, torch.bfloat16: 1}  # `half` in the C files: the dtype of inputs and outputs
_EXTRA_FIELDS = ("upper", "dmin", "zero", "minimum")  # each kind has at most one of these fields
FEW = 8  # up to this many rows, decoding in registers for each row is faster than a tile in memory


def shared_by_rows(table: Table, fields: Fields) -> Float32[Tensor, " numbers"]:
    """Build the array of everything that all rows share, in the layout of `shared` in products.c."""
    group = width(fields, table) // fields["d"].shape[-1]
    offset = 1 if "zero" in fields else 2 if "minimum" in fields else 0
    way = _way(table, fields)
    centre = _centre(fields) if way == _EVEN else 0.0
    table_values = torch.zeros(256)
    table_values[: TABLES[table.name]] = values_of(table, torch.device("cpu"))
    tables = table_values, table_values - centre
    first_numbers = [numbers[:16].clone() for numbers in tables]
    if table.name == "TABLE_4" and way == _EVEN and group % RUN == 0 and _are_shifts(fields, table_values[0]):
        way = _SHIFTED
    elif table.name == "TABLE_4":
        way = _SHORT if all((numbers == numbers.bfloat16()).all() for numbers in first_numbers) else _LOOK_UP
    integers = torch.tensor([group // RUN, way, offset], dtype=torch.int32)
    factors = torch.tensor([*(1.0 if scale is None else scale for scale in (table.factor, table.divisor)), centre])
    in_bytes = [numbers.view(torch.uint8).view(16, 4).T.flatten().view(torch.float32) for numbers in first_numbers]
    return torch.cat((integers.view(torch.float32), factors, *tables, *in_bytes))


def _are_shifts(fields: Fields, first: Tensor) -> bool:
    """Tell if every zero point is the first number plus an integer from 0 to 16; False without zero points."""
    if (zero := fields.get("zero")) is None or not (zero == zero.round()).all():
        return False
    return bool(((zero >= first) & (zero <= first + 16)).all())


def _centre(fields: Fields) -> float:
    """Return the integer nearest to the mean code that decodes to 0; 0 without minima. Codes minus it are summed."""
    if "minimum" not in fields or not (n_scaled := fields["d"].count_nonzero()):
        return 0.0
    codes = torch.where(fields["d"] != 0, -fields["minimum"] / fields["d"], 0)
    return float((codes.sum() / n_scaled).round().clamp(0, 255))


def _way(table: Table, fields: Fields) -> int:
    """Return how a code becomes its number: "EVEN" for integers in sequence, a formula, or a table."""
    table_values = values_of(table, torch.device("cpu"))
    if table.values == INT8.tobytes():
        return _SIGNED
    if table.values == E4M3.tobytes() and "zero" not in fields:
        return _E4M3
    return _EVEN if torch.equal(table_values, table_values[0].round() + torch.arange(len(table_values))) else _LOOK_UP


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
            shared = shared_by_rows(ggml_type, fields)
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


ORDERS = {"rows": 0, "high first": 1, "columns": 2, "awq": 3}  # `order` in packing.c
_FIELDS = ("codes", "upper", "scales", "d", "dmin")  # of blocks, in the order of packing.c


def packed_codes(
    codes: Unpacker, part: StoredPart, library: ctypes.CDLL, empty: Callable[..., Tensor] = torch.empty
) -> UInt8[Tensor, "out bytes"] | None:
    """Pack the codes of a whole matrix; None if C cannot pack them, for example codes of 3 bits.

    The result is also None for a part with more than the codes, such as padding, or less. `empty` allocates.
    """
    n_out, n_in = codes.shape
    if codes.bits not in (4, 8) or part.raw.nbytes != n_out * n_in * codes.bits // 8:
        return None
    packed = empty(n_out, n_in * codes.bits // 8, dtype=torch.uint8)
    if codes.bits == 8 and codes.order == "rows":
        packed.numpy()[...] = codes({codes.part: part}, slice(0, n_out))
    else:
        raw_codes = np.ascontiguousarray(part.raw)
        order = ORDERS[codes.order]
        library.llorch_pack_codes(order, codes.bits, raw_codes.ctypes.data, packed.data_ptr(), n_out, n_in)
    return packed


def pack_blocks(
    blocks: UInt8[np.ndarray, "out row_bytes"], ggml_type: GGMLType, fields: Fields, library: ctypes.CDLL
) -> None:
    """Write the fields of some rows of blocks, as `packing.pack` makes them; each field has these rows only."""
    rows = np.ascontiguousarray(blocks)
    assert all(field.is_contiguous() and len(field) == len(rows) for field in fields.values())
    pointers = (fields[name].data_ptr() if name in fields else None for name in _FIELDS)
    library.llorch_pack_blocks(KINDS[ggml_type], rows.ctypes.data, *pointers, rows.size // BLOCK_SIZES[ggml_type][1])
