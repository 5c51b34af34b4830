"""Product of one row of activations and a dense matrix, which is read once: the main work of a decode step.

A program computes some rows of the matrix with all of their columns, so that no sum is split between programs. A thread
loads 16 bytes of each of its rows and uses the same inputs for all. Sums are float32, rounded once. The reference is
`torch.nn.functional.linear`, which computes all inputs with more rows: on an H100 its tensor cores are as fast for two
rows and faster for more.

Projections of one input (queries, keys and values; gate and up) share one launch: alone, the key projection of a
model with grouped heads ends before the memory is busy.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, no_type_check
from weakref import ref

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

MultiplyAll = Callable[[Tensor, Sequence[Any]], list[Tensor]]  # (input, layers) -> product of each layer
MOST_TOGETHER = 3  # maximum number of matrices of one launch
_PROGRAMS = 512  # about four per multiprocessor of a large device
_WARPS = 8


class DenseLinear(nn.Module):
    """Linear layer for inference with the interface of `nn.Linear`."""

    def __init__(self, layer: nn.Linear) -> None:
        """Share the parameters of a linear layer in float32, bfloat16 or float16."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.shared_launch: SharedInputProducts | None = None

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in the dtype of the weights."""
        if x.numel() > self.in_features:
            return linear(x, self.weight, self.bias)
        return multiply_row(x, [self])[0] if self.shared_launch is None else self.shared_launch.product(self, x)


def share_launch(layers: Sequence[Any], multiply: MultiplyAll) -> "SharedInputProducts":
    """Compute layers of the same input in one launch of `multiply`; each has an attribute `shared_launch`."""
    products = SharedInputProducts([ref(layer) for layer in layers], multiply)
    for layer in layers:
        layer.shared_launch = products
    return products


class SharedInputProducts(threading.local):
    """Linear layers of the same input: the first request for a product computes all products.

    Every host thread has separate products (`threading.local`), so two may run one model. It keeps no layer alive.
    """

    def __init__(self, layers: Sequence[ref], multiply: MultiplyAll) -> None:
        """Start without products; use `share_launch` to create one."""
        self._layers, self._multiply = layers, multiply
        self._input: Tensor | None = None
        self._products: dict[nn.Module, Tensor] = {}

    def product(self, layer: nn.Module, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Return a layer's product for this tensor object; each product is returned once, then computed again."""
        if x is not self._input or layer not in self._products:
            layers = [live_layer for layer_ref in self._layers if (live_layer := layer_ref()) is not None]
            products = self._multiply(x, layers)
            self._input, self._products = x, dict(zip(layers, products, strict=True))
        product = self._products.pop(layer)
        if not self._products:
            self._input = None
        return product


def multiply_row(x: Float[Tensor, "*one in"], layers: Sequence[DenseLinear]) -> list[Tensor]:
    """Compute x @ weight.T + bias of up to `MOST_TOGETHER` layers in one launch; only their row counts may differ."""
    x, width = x.contiguous(), x.shape[-1]
    sizes = [layer.out_features for layer in layers]
    products = [x.new_empty(*x.shape[:-1], size) for size in sizes]
    weights = [layer.weight for layer in layers]
    biases = [product if layer.bias is None else layer.bias for layer, product in zip(layers, products, strict=True)]
    rows = 2 if sum(sizes) >= 2 * _PROGRAMS else 1  # two rows of a program share inputs; one if programs are few
    span = 16 // x.element_size()
    launch: Any = _multiply[(sum(triton.cdiv(size, rows) for size in sizes),)]
    launch(
        x, *_pad(weights), *_pad(biases), *_pad(products), width, *(*sizes, 0, 0)[:MOST_TOGETHER],
        BIAS=layers[0].bias is not None, ROWS=rows,
        COLUMNS=min(_WARPS * 32 * span, max(span, triton.next_power_of_2(width))), SPAN=span, num_warps=_WARPS,
    )  # fmt: skip
    return products


def _pad(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pad the kernel's pointer arguments; those after the last tensor are never read."""
    return [*tensors, *[tensors[0]] * (MOST_TOGETHER - len(tensors))]


@triton.jit(do_not_specialize=["size0", "size1", "size2"])
@no_type_check
def _multiply(
    x, weight0, weight1, weight2, bias0, bias1, bias2, y0, y1, y2, width, size0, size1, size2,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Multiply one row by a tile of rows of one of up to three matrices; sums are float32."""
    tile = tl.program_id(0)
    weight, bias, y, size = weight0, bias0, y0, size0
    tiles0, tiles1 = tl.cdiv(size0, ROWS), tl.cdiv(size1, ROWS)
    if tile >= tiles0 + tiles1:
        weight, bias, y, size, tile = weight2, bias2, y2, size2, tile - tiles0 - tiles1
    elif tile >= tiles0:
        weight, bias, y, size, tile = weight1, bias1, y1, size1, tile - tiles0
    row = (tile.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]  # three axes: others change the thread layout
    offsets = tl.arange(0, COLUMNS // SPAN)[None, :, None] * SPAN + tl.arange(0, SPAN)[None, None, :]
    total = tl.zeros((ROWS, COLUMNS // SPAN, 1), tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + offsets
        w = tl.load(weight + row * width + column, mask=(row < size) & (column < width), other=0)
        inputs = tl.load(x + column, mask=column < width, other=0)
        total += tl.sum(w.to(tl.float32) * inputs.to(tl.float32), 2, keep_dims=True)  # a sum in one thread
    sums = tl.sum(total, 1, keep_dims=True)  # (ROWS, 1, 1)
    if BIAS:
        sums += tl.load(bias + row, mask=row < size, other=0).to(tl.float32)
    tl.store(y + row, sums.to(y.dtype.element_ty), mask=row < size)
