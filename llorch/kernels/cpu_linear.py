"""A linear layer for the CPU that reads its weights once and no second time: few rows here, many in oneDNN.

torch multiplies one row at 18 (float32, MKL) or 38 GB/s (oneDNN) on the AMD processor it was measured on, the loops of
`cpu_products.c` at what the memory gives, up to 77. Many rows go to oneDNN, also in float32, where `nn.Linear` asks MKL
for half the speed. It is given the plain weights: packed ones would be a tenth faster and a second copy.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.kernels.cpu_library import pointer

KINDS = {torch.float32: 0, torch.bfloat16: 1}
FEW = {torch.float32: 8, torch.bfloat16: 4}  # rows up to which the loops are faster than oneDNN


class CpuLinear(nn.Module):
    """A linear layer, with the interface of `nn.Linear`, for inference: nothing is recorded for a backward pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL | None) -> None:
        """Take over the parameters of a plain layer, or of an embedding that it shares them with.

        Args:
            weight: (out, in), contiguous, of a dtype in `KINDS`.
            bias: In the same dtype.
            library: From `llorch.kernels.cpu_library`; None leaves all rows to oneDNN.
        """
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.library = library
        self._few, self._sizes = FEW[weight.dtype], (KINDS[weight.dtype], *weight.shape)

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply, in the dtype of the weights; sums are float32 and rounded once."""
        weight, bias, library = self.weight, self.bias, self.library
        kind, out, width = self._sizes
        if library is None or x.numel() > self._few * width:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: expected an input of {weight.dtype}, got {x.dtype}")
        x, rows = x.contiguous(), x.numel() // width
        y = x.new_empty(*x.shape[:-1], out)
        pointers = x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
        if library.llorch_product(kind, weight.data_ptr(), None, None, None, kind, *pointers, rows, out, width):
            raise MemoryError(f"linear: no memory for {rows} rows")
        return y

    def described(self) -> tuple[int | None, ...]:
        """Addresses and sizes as `cpu_block.c` wants them."""
        return self.weight.data_ptr(), None, None, None, pointer(self.bias), *self._sizes
