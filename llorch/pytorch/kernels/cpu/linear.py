"""A linear layer for the CPU that reads its weights once and no second time: few rows here, many in oneDNN.

torch multiplies one row at 18 (float32, MKL) or 38 GB/s (oneDNN) on the AMD processor it was measured on, the loops of
`cpu_fixed.c` at what the memory gives, up to 77. Many rows go to oneDNN, also in float32, where `nn.Linear` asks MKL
for half the speed. It is given the plain weights: packed ones would be a tenth faster and a second copy. On processors
without AVX512 oneDNN has no bfloat16: there a tile of weights at a time is widened to float32, which takes a seventh of
the time of torch's own product (AMD Zen 3, one core, 128 rows by 896 x 4864: 21 and 141 ms).
"""

import ctypes
from functools import cache
from sys import maxsize

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from llorch.pytorch.kernels.cpu.library import pointer

KINDS = {torch.float32: 0, torch.bfloat16: 1}
FEW = {torch.float32: 8, torch.bfloat16: 4}  # rows up to which the loops are faster than oneDNN
TILE = 1 << 23  # elements of a tile; smaller ones that stay in the cache cost more in calls than they save


class CpuLinear(nn.Module):
    """A linear layer, with the interface of `nn.Linear`, for inference: nothing is recorded for a backward pass."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL | None, *, fixed: bool = False
    ) -> None:
        """Take over contiguous parameters of a dtype in `KINDS`; without a library all rows go to oneDNN.

        `fixed`: none does, so that no row depends on its company.
        """
        super().__init__()
        self.fixed = fixed
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.library = library
        self._most = maxsize if fixed else FEW[weight.dtype] * self.in_features  # elements of an input
        self._sizes = KINDS[weight.dtype], *weight.shape

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply, in the dtype of the weights; sums are float32 and rounded once."""
        weight, bias, library = self.weight, self.bias, self.library
        kind, out, width = self._sizes
        if library is None or x.numel() > self._most:
            return product(x, weight, bias)
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: expected an input of {weight.dtype}, got {x.dtype}")
        x, rows = x.contiguous(), x.numel() // width
        y = x.new_empty(*x.shape[:-1], out)
        pointers = x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
        if library.llorch_fixed_product(kind, weight.data_ptr(), None, None, None, kind, *pointers, rows, out, width):
            raise MemoryError(f"linear: cannot allocate memory for {rows} rows")
        return y

    def described(self) -> tuple[int | None, ...]:
        """Return the addresses and sizes as `cpu_block.c` wants them."""
        return self.weight.data_ptr(), None, None, None, pointer(self.bias), *self._sizes


def product(
    x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*rows out"]:
    """Multiply many rows, in the dtype of the weights; sums are float32 and rounded once."""
    if onednn_multiplies(x.dtype):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if x.dtype is torch.float32:
        return linear(x, weight, bias)
    wide, step = x.float(), max(1, TILE // weight.shape[1])
    biases = [None] * len(weight) if bias is None else bias.float().split(step)
    tiles = zip(weight.split(step), biases, strict=False)
    return torch.cat([product(wide, rows.float(), part).to(x.dtype) for rows, part in tiles], dim=-1)


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies a dtype on this processor: tried, since no flag of torch tells it."""
    try:
        one = torch.ones(1, 1, dtype=dtype)
        torch.ops.mkldnn._linear_pointwise(one, one, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no kernel; no such function
        return False
    return True
