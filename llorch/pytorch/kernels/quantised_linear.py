"""Modules of the torch model with a packed (quantised) matrix: a linear layer and an embedding; see `packing`.

`multiply` computes the product, `multiply_back` the gradient of its input; the frozen matrix has no gradient. The
functions here, references of all kernels, decode a tile of rows and multiply it with torch. Kernel tables replace them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from llorch.pytorch.kernels.packing import Fields, Kind, decode, width

Multiply = Callable[[Tensor, Fields, Kind, Tensor | None], Tensor]
RowFunction = Callable[[Tensor], Tensor]
MultiplyBack = Callable[[Tensor, Fields, Kind], Tensor]
Decode = Callable[[Fields, Kind, torch.dtype], Tensor]
Tiles = Iterable[tuple[slice, Tensor]]  # decoded rows of a matrix, in order, with their place
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of rows, a matrix and a bias

_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
TILE = 1 << 22  # elements decoded at a time: small against a model, large enough for efficient products


def count_rows(fields: Fields) -> int:
    """Count the rows of a matrix, which each of its fields has."""
    return len(next(iter(fields.values())))


class PackedMatrix(nn.Module):
    """Fields of a packed matrix, stored as integers so that `.to(dtype)` of a model does not change them."""

    def __init__(self, fields: Fields, ggml_type: Kind) -> None:
        """Store fields made by `pack`; matrices with the same tensors share them."""
        super().__init__()
        self.ggml_type = ggml_type
        self.out_features = count_rows(fields)
        self.in_features = width(fields, ggml_type)
        self._dtypes = {name: field.dtype for name, field in fields.items()}
        for name, field in fields.items():
            self.register_buffer(name, field.view(_INTEGERS.get(field.dtype, field.dtype)))

    @property
    def fields(self) -> dict[str, Tensor]:
        """Fields as `pack` made them: views of the buffers."""
        return {name: self.get_buffer(name).view(dtype) for name, dtype in self._dtypes.items()}

    def extra_repr(self) -> str:
        """Return the text that torch prints for the module."""
        return f"{self.ggml_type.name}, out_features={self.out_features}, in_features={self.in_features}"


class QuantisedLinear(PackedMatrix):
    """Packed linear layer with the interface of `nn.Linear`."""

    def __init__(self, fields: Fields, ggml_type: Kind) -> None:
        """Start without a bias; the loader sets the parameter `bias`."""
        super().__init__(fields, ggml_type)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        self.multiply: Multiply = multiply_by_tiles
        self.multiply_back: MultiplyBack = back_by_tiles

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in the dtype of `x`."""
        flat = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled() and x.requires_grad:
            y: Any = FrozenProduct.apply(flat, self._product, self._gradient)
        else:
            y = self._product(flat)
        return y.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return self.multiply(x, self.fields, self.ggml_type, self.bias)

    def _gradient(self, grad: Float[Tensor, "rows out"]) -> Float[Tensor, "rows in"]:
        return self.multiply_back(grad, self.fields, self.ggml_type)


class Reordered(nn.Module):
    """Packed layer whose columns are in another order than its inputs: columns of a block cannot be separated."""

    def __init__(self, kernel: nn.Module, columns: Int[Tensor, " in"]) -> None:
        """Wrap a layer; `columns` maps each input to its column."""
        super().__init__()
        self.kernel = kernel
        self.order: Tensor
        self.register_buffer("order", columns.argsort())

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Reorder the inputs, then multiply."""
        return self.kernel(x[..., self.order])


class FrozenProduct(torch.autograd.Function):
    """Product with a frozen matrix; saves no tensor for the backward pass, which uses the matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: RowFunction, multiply_back: RowFunction) -> Tensor:
        """Multiply; save the function that computes the gradient of `x`."""
        ctx.multiply_back = multiply_back
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Compute the gradient of the input."""
        return ctx.multiply_back(grads[0]), None, None


class QuantisedEmbedding(PackedMatrix):
    """Packed embedding with the interface of `nn.Embedding`; only requested rows are decoded."""

    def __init__(self, fields: Fields, ggml_type: Kind, dtype: torch.dtype) -> None:
        """Store the fields; rows are returned in `dtype`, or the dtype of a later `.to(dtype)` of the model."""
        super().__init__(fields, ggml_type)
        self.of_dtype: Tensor  # empty; records the dtype of a later `.to(dtype)`
        self.register_buffer(
            "of_dtype", torch.empty(0, dtype=dtype, device=next(iter(fields.values())).device), persistent=False
        )

    def forward(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows in"]:
        """Decode some rows."""
        return decode({name: field[ids] for name, field in self.fields.items()}, self.ggml_type).to(self.of_dtype.dtype)


def multiply_by_tiles(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, one tile of the matrix, rounded to the dtype of `x`, at a time."""
    return multiply_tiles(x, tiles(fields, ggml_type, x.dtype), count_rows(fields), bias)


def back_by_tiles(grad: Float[Tensor, "rows out"], fields: Fields, ggml_type: Kind) -> Float[Tensor, "rows in"]:
    """Compute grad @ decode(fields), the gradient of the input."""
    return multiply_tiles_back(grad, tiles(fields, ggml_type, grad.dtype))


def multiply_tiles(
    x: Float[Tensor, "*rows in"], tiles: Tiles, n_out: int, bias: Float[Tensor, " out"] | None,
    product: Product = linear,
) -> Float[Tensor, "*rows out"]:  # fmt: skip
    """Compute x @ matrix.T + bias from the tiles of a matrix of `n_out` rows."""
    y: Any = None
    for rows, tile in tiles:
        rows_of_y = product(x, tile, None if bias is None else bias[rows])
        if len(tile) == n_out:
            return rows_of_y
        y = x.new_empty(*x.shape[:-1], n_out) if y is None else y
        y[..., rows] = rows_of_y
    return y


def multiply_tiles_back(
    grad: Float[Tensor, "*rows out"], tiles: Tiles, product: Product = linear
) -> Float[Tensor, "*rows in"]:
    """Compute grad @ matrix, the gradient of the input; products of tiles are added in at least float32."""
    total: Any = None
    for rows, tile in tiles:
        part = product(grad[..., rows].contiguous(), tile.T, None)
        if len(tile) == grad.shape[-1]:
            return part
        total = part.to(torch.promote_types(part.dtype, torch.float32)) if total is None else total.add_(part)
    return total.to(grad.dtype)


def decode_rounded(fields: Fields, ggml_type: Kind, dtype: torch.dtype) -> Float[Tensor, "rows in"]:
    """Decode a matrix, or some rows, and round to `dtype`."""
    return decode(fields, ggml_type).to(dtype)


def tiles(
    fields: Fields, ggml_type: Kind, dtype: torch.dtype, *, size: int | None = None, decode_to: Decode = decode_rounded
) -> Iterator[tuple[slice, Float[Tensor, "rows in"]]]:
    """Decode a matrix to `dtype`, `size` elements (`TILE`) at a time: yield the row slice and the rows."""
    n_rows, step = count_rows(fields), max(1, (size or TILE) // width(fields, ggml_type))
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        yield rows, decode_to({name: field[rows] for name, field in fields.items()}, ggml_type, dtype)
