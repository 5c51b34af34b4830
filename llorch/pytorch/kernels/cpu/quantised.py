"""Products with a packed matrix on the CPU: few rows straight from the blocks, many by decoding a tile at a time.

The layouts are those of `llorch.pytorch.kernels.packing`, whose `decode` gives the same numbers, bit for bit.
Codes of a quantised folder or a GGUF file are packed anew by `cpu_packing.c` from the bytes of the file. The references
are `stored_kinds` and `packing.pack`, which have each code in a byte of its own meanwhile, and so take several times as
long.
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
from llorch.files.quantised.matrix import CodesOf, StoredPart
from llorch.pytorch.kernels.cpu.library import pointer
from llorch.pytorch.kernels.cpu.linear import TILE, product
from llorch.pytorch.kernels.packing import RUN, TABLES, Fields, Kind, Table, values_of, width
from llorch.pytorch.kernels.quantised_linear import FrozenProduct, PackedMatrix

KINDS = {  # `kind` in cpu_products.c
    GGMLType.BF16: 1, GGMLType.Q8_0: 2, GGMLType.Q4_0: 3, GGMLType.Q4_K: 4, GGMLType.Q6_K: 5, GGMLType.F16: 8,
}  # fmt: skip
TABLE_KINDS = {"TABLE_4": 6, "TABLE_8": 7}
_LOOK_UP, _SIGNED, _E4M3, _EVEN, _SHORT, _SHIFTED = range(6)  # `way` in cpu_products.c
HALF = {torch.float32: 0, torch.bfloat16: 1}
_MORE = ("upper", "dmin", "zero", "minimum")  # a kind has one of these at most
FEW = 8  # rows up to which decoding in registers, once per row, is faster than a tile in memory


def shared_by_rows(table: Table, fields: Fields) -> Float32[Tensor, " numbers"]:
    """Lay out what all rows share, as `shared` in cpu_products.c has it."""
    group = width(fields, table) // fields["d"].shape[-1]
    offset = 1 if "zero" in fields else 2 if "minimum" in fields else 0
    way = _way(table, fields)
    centre = _centre(fields) if way == _EVEN else 0.0
    values = torch.zeros(256)
    values[: TABLES[table.name]] = values_of(table, torch.device("cpu"))
    both = values, values - centre
    first = [numbers[:16].clone() for numbers in both]
    if table.name == "TABLE_4" and way == _EVEN and group % RUN == 0 and _are_shifts(fields, values[0]):
        way = _SHIFTED
    elif table.name == "TABLE_4":
        way = _SHORT if all((numbers == numbers.bfloat16()).all() for numbers in first) else _LOOK_UP
    integers = torch.tensor([group // RUN, way, offset], dtype=torch.int32)
    factors = torch.tensor([*(1.0 if one is None else one for one in (table.factor, table.divisor)), centre])
    in_bytes = [numbers.view(torch.uint8).view(16, 4).T.flatten().view(torch.float32) for numbers in first]
    return torch.cat((integers.view(torch.float32), factors, *both, *in_bytes))


def _are_shifts(fields: Fields, first: Tensor) -> bool:
    """Tell if every zero point is the first number plus an integer from 0 to 16; False if there are none."""
    if (zero := fields.get("zero")) is None or not (zero == zero.round()).all():
        return False
    return bool(((zero >= first) & (zero <= first + 16)).all())


def _centre(fields: Fields) -> float:
    """Find the integer next to the mean number that stands for zero; 0 without minima."""
    if "minimum" not in fields or not (n_scaled := fields["d"].count_nonzero()):
        return 0.0
    codes = torch.where(fields["d"] != 0, -fields["minimum"] / fields["d"], 0)
    return float((codes.sum() / n_scaled).round().clamp(0, 255))


def _way(table: Table, fields: Fields) -> int:
    values = values_of(table, torch.device("cpu"))
    if table.values == INT8.tobytes():
        return _SIGNED
    if table.values == E4M3.tobytes() and "zero" not in fields:
        return _E4M3
    return _EVEN if torch.equal(values, values[0].round() + torch.arange(len(values))) else _LOOK_UP


class CpuQuantisedLinear(PackedMatrix):
    """A linear layer, with the interface of `nn.Linear`, for inference: nothing is recorded for a backward pass."""

    def __init__(
        self, fields: Fields, ggml_type: Kind, bias: Tensor | None, library: ctypes.CDLL, *, fixed: bool = False,
        shared: Float32[Tensor, " numbers"] | None = None,
    ) -> None:  # fmt: skip
        """Take over the fields of a packed layer, or of an embedding that it shares them with.

        `fixed`: rows are multiplied by the decoded matrix however few they are, so none depends on its company.
        `shared`: see `shared_by_rows`, if it is known from a matrix that these rows are part of.
        """
        super().__init__(fields, ggml_type)
        self.bias, self.fixed = bias, fixed
        self.library = library
        self._kind = TABLE_KINDS[ggml_type.name] if isinstance(ggml_type, Table) else KINDS[ggml_type]
        if shared is None and isinstance(ggml_type, Table):
            shared = shared_by_rows(ggml_type, fields)
        self.shared = shared
        self._found: tuple[int | None, ...] = ()
        self._found_for: object = None

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply, in the dtype of `x`; sums are float32 and rounded once."""
        x = x.contiguous()
        rows = x.numel() // self.in_features
        if rows > FEW and not self.fixed:
            return self._many(x.view(rows, -1)).view(*x.shape[:-1], self.out_features)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        sizes = rows, self.out_features, self.in_features
        multiply = self.library.llorch_fixed_product if self.fixed else self.library.llorch_product
        if multiply(*self.matrix_of(x.dtype), x.data_ptr(), pointer(self.bias), y.data_ptr(), *sizes):
            raise MemoryError(f"linear: cannot allocate memory for {rows} rows")
        return y

    def _many(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        bias = self.bias
        made = [product(x, tile, None if bias is None else bias[rows]) for rows, tile in self._tiles(x)]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _tiles(self, x: Tensor) -> Iterator[tuple[slice, Float[Tensor, "rows in"]]]:
        """Yield some rows at a time, decoded to the dtype of `x`. Each tile overwrites the tile before it."""
        step = max(1, TILE // self.in_features)
        room = x.new_empty(min(step, self.out_features), self.in_features)
        for start in range(0, self.out_features, step):
            tile = room[: self.out_features - start]
            sizes = start, len(tile), self.in_features
            self.library.llorch_decode(*self.matrix_of(x.dtype), tile.data_ptr(), *sizes)
            yield slice(start, start + len(tile)), tile

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the arguments that describe the matrix to compiled functions, found once until fields are moved."""
        buffers = self._buffers
        if buffers["codes"] is not self._found_for:
            more = next((buffers[name] for name in _MORE if name in buffers), None)
            scales = buffers.get("scales") if self.shared is None else self.shared
            self._found = tuple(map(pointer, (buffers["codes"], buffers.get("d"), scales, more)))
            self._found_for = buffers["codes"]
        return self._kind, *self._found, HALF[dtype]

    def described(self) -> tuple[int | None, ...]:
        """Return the addresses and sizes as `cpu_block.c` wants them."""
        kind, *found, _ = self.matrix_of(torch.float32)
        return *found, pointer(self.bias), kind, self.out_features, self.in_features


class TrainedQuantisedLinear(CpuQuantisedLinear):
    """A linear layer with the interface of `nn.Linear`, whose products have a gradient for their input."""

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply by the decoded matrix, in the dtype of `x`, however few the rows are."""
        y: Any = FrozenProduct.apply(x.reshape(-1, self.in_features), self._many, self.multiply_back)
        return y.view(*x.shape[:-1], self.out_features)

    def multiply_back(self, grad: Float[Tensor, "rows out"]) -> Float[Tensor, "rows in"]:
        """Compute grad @ matrix, the gradient of the input; tiles are summed in float32."""
        total = grad.new_zeros(len(grad), self.in_features, dtype=torch.float32)
        for rows, tile in self._tiles(grad):
            total += product(grad[:, rows].contiguous(), tile.T, None)
        return total.to(grad.dtype)


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
