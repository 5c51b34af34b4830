"""Modules of the torch model whose matrix stays packed: a linear layer and an embedding.

`multiply` makes the product, and `multiply_back` the gradient of its input. The matrix is frozen, so it has none. The
functions here, the references of all kernels, decode a tile of rows and multiply it by torch's functions; kernels take
their places from outside.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from llorch.pytorch.kernels.packing import Fields, Kind, decode, width

Multiply = Callable[[Tensor, Fields, Kind, Tensor | None], Tensor]
OfRows = Callable[[Tensor], Tensor]
MultiplyBack = Callable[[Tensor, Fields, Kind], Tensor]

_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
TILE = 1 << 22  # elements decoded in one go: little beside a model, enough for the product to be efficient


class PackedMatrix(nn.Module):
    """The fields of a packed matrix, kept as integers, so that `.to(dtype)` of a model changes none of them."""

    def __init__(self, fields: Fields, ggml_type: Kind) -> None:
        """Keep fields made by `pack`; matrices that are given the same ones share them."""
        super().__init__()
        self.ggml_type = ggml_type
        self.out_features = len(fields["codes"])
        self.in_features = width(fields, ggml_type)
        self._dtypes = {name: field.dtype for name, field in fields.items()}
        for name, field in fields.items():
            self.register_buffer(name, field.view(_INTEGERS.get(field.dtype, field.dtype)))

    @property
    def fields(self) -> dict[str, Tensor]:
        """The fields as `pack` made them, views of the buffers."""
        return {name: self.get_buffer(name).view(dtype) for name, dtype in self._dtypes.items()}

    def extra_repr(self) -> str:
        """Return the text that torch prints of the module."""
        return f"{self.ggml_type.name}, out_features={self.out_features}, in_features={self.in_features}"


class QuantisedLinear(PackedMatrix):
    """A linear layer, with the interface of `nn.Linear`."""

    def __init__(self, fields: Fields, ggml_type: Kind) -> None:
        """Start without a bias, which is set as the parameter `bias`."""
        super().__init__(fields, ggml_type)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        self.multiply: Multiply = multiply_by_tiles
        self.multiply_back: MultiplyBack = back_by_tiles

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply, in the dtype of `x`."""
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
    """A packed layer whose columns lie otherwise in its file than inputs come; blocks cannot be cut to move them."""

    def __init__(self, kernel: nn.Module, columns: Int[Tensor, " in"]) -> None:
        """Wrap a layer; `columns` says where each input belongs."""
        super().__init__()
        self.kernel = kernel
        self.order: Tensor
        self.register_buffer("order", columns.argsort())

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply what was put in order."""
        return self.kernel(x[..., self.order])


class FrozenProduct(torch.autograd.Function):
    """A product with a frozen matrix; no tensor is kept for the backward pass, which has the matrix itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: OfRows, multiply_back: OfRows) -> Tensor:
        """Multiply; keep the function that makes the gradient of `x`."""
        ctx.multiply_back = multiply_back
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Compute the gradient of the input."""
        return ctx.multiply_back(grads[0]), None, None


class QuantisedEmbedding(PackedMatrix):
    """An embedding, with the interface of `nn.Embedding`; only the rows that are asked for are decoded."""

    def __init__(self, fields: Fields, ggml_type: Kind, dtype: torch.dtype) -> None:
        """Keep the fields; rows are handed out in `dtype`, or that of a later `.to(dtype)` of the model."""
        super().__init__(fields, ggml_type)
        self.of_dtype: Tensor  # empty; `.to(dtype)` changes its dtype as it does those of norms
        self.register_buffer("of_dtype", torch.empty(0, dtype=dtype, device=fields["codes"].device), persistent=False)

    def forward(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows in"]:
        """Decode some rows."""
        return decode({name: field[ids] for name, field in self.fields.items()}, self.ggml_type).to(self.of_dtype.dtype)


def multiply_by_tiles(
    x: Float[Tensor, "rows in"], fields: Fields, ggml_type: Kind, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Compute x @ decode(fields).T + bias, a tile of the matrix, rounded to the dtype of `x`, at a time."""
    y = x.new_empty(len(x), len(fields["codes"]))
    for part, tile in tiles(fields, ggml_type, x.dtype):
        y[:, part] = linear(x, tile, None if bias is None else bias[part])
    return y


def back_by_tiles(grad: Float[Tensor, "rows out"], fields: Fields, ggml_type: Kind) -> Float[Tensor, "rows in"]:
    """Compute grad @ decode(fields), the gradient of a product's input; tiles are summed in at least float32."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(len(grad), width(fields, ggml_type), dtype=wide)
    for part, tile in tiles(fields, ggml_type, grad.dtype):
        total += grad[:, part] @ tile
    return total.to(grad.dtype)


def tiles(fields: Fields, ggml_type: Kind, dtype: torch.dtype) -> Iterator[tuple[slice, Float[Tensor, "rows in"]]]:
    """Decode a matrix, `TILE` elements at a time, rounded to `dtype`: which rows, and the rows."""
    n_rows, step = len(fields["codes"]), max(1, TILE // width(fields, ggml_type))
    for start in range(0, n_rows, step):
        part = slice(start, min(start + step, n_rows))
        yield part, decode({name: field[part] for name, field in fields.items()}, ggml_type).to(dtype)
