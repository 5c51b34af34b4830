"""Linear layer for the CPU that reads its weights once: few rows in `fixed.c`, many rows in oneDNN.

On the measured AMD processor torch multiplies one row at 18 GB/s (float32, MKL) or 38 GB/s (oneDNN), `fixed.c` at
memory bandwidth, up to 77 GB/s. Many rows use oneDNN, also in float32, where `nn.Linear` calls MKL at half the speed.
The weights are not prepacked: prepacked weights are a tenth faster but need a second copy. On processors without
AVX512 oneDNN has no bfloat16: there a tile of weights at a time is converted to float32, which takes a seventh of
the time of torch's own product (AMD Zen 3, one core, 128 rows by 896 x 4864: 21 and 141 ms).
"""

import ctypes
from functools import cache
from sys import maxsize

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

KINDS = {torch.float32: 0, torch.bfloat16: 1}  # `kind` of a dense matrix in the C files
FEW = {torch.float32: 8, torch.bfloat16: 4}  # up to this many rows, `fixed.c` is faster than oneDNN
TILE = 1 << 23  # elements; a smaller tile that fits the cache costs more in calls than it saves


class CpuLinear(nn.Module):
    """Linear layer with the interface of `nn.Linear`, for inference: it does not support backward."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL | None, *, fixed: bool = False
    ) -> None:
        """Take over contiguous parameters of a dtype in `KINDS`; without a library all rows use oneDNN.

        `fixed`: no row uses oneDNN, so that no row depends on other rows.
        """
        super().__init__()
        self.fixed = fixed
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.library = library
        self._max_elements = maxsize if fixed else FEW[weight.dtype] * self.in_features  # of an input for fixed.c
        self._sizes = KINDS[weight.dtype], *weight.shape

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in the dtype of the weights; sums are float32 and rounded once."""
        weight, bias, library = self.weight, self.bias, self.library
        _, out, width = self._sizes
        if library is None or x.numel() > self._max_elements:
            return product(x, weight, bias)
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: expected an input of {weight.dtype}, got {x.dtype}")
        x, rows = x.contiguous(), x.numel() // width
        y = x.new_empty(*x.shape[:-1], out)
        pointers = x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
        multiply = library.llorch_product if rows == 1 and not self.fixed else library.llorch_fixed_product
        if multiply(*self.matrix_of(x.dtype), *pointers, rows, out, width):
            raise MemoryError(f"linear: cannot allocate memory for {rows} rows")
        return y

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the matrix arguments of compiled functions; `dtype` is that of the weights."""
        return self._sizes[0], self.weight.data_ptr(), None, None, None, KINDS[dtype]

    def part(self, rows: slice) -> "CpuLinear":
        """Return a view of some rows, without a bias."""
        return CpuLinear(self.weight[rows], None, self.library)


def product(
    x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*rows out"]:
    """Multiply many rows in the dtype of the weights; sums are float32 and rounded once."""
    if onednn_multiplies(x.dtype):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if x.dtype is torch.float32:
        return linear(x, weight, bias)
    x_float32, step = x.float(), max(1, TILE // weight.shape[1])
    biases = [None] * len(weight) if bias is None else bias.float().split(step)
    tiles = zip(weight.split(step), biases, strict=False)
    return torch.cat([product(x_float32, rows.float(), part).to(x.dtype) for rows, part in tiles], dim=-1)


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Tell if oneDNN multiplies a dtype on this processor, by a test product, because torch has no flag for it."""
    try:
        unit = torch.ones(1, 1, dtype=dtype)
        torch.ops.mkldnn._linear_pointwise(unit, unit, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no kernel; no such function
        return False
    return True
