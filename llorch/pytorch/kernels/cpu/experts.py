"""Products with the matrices of selected experts on the CPU: a few rows in one call, many rows expert by expert.

Each of a few rows is multiplied by the matrix of its expert, dense or packed, so a token reads only its experts'
weights. If many tokens share experts, an expert multiplies all of its rows in one product, as any projection does.
"""

import ctypes

import torch
from torch import Tensor, nn

from llorch.pytorch.kernels.cpu.linear import KINDS, CpuLinear
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.kernels.packing import Fields, Kind
from llorch.pytorch.models.experts import ExpertIds, PerExpert, grouped

FEW = 32  # up to this many rows, one call for all is faster


class _ExpertProducts(nn.Module):
    """Base of dense and packed experts; `matrix_of(dtype)` returns arguments of the compiled function."""

    def __init__(self, sizes: tuple[int, int, int], library: ctypes.CDLL) -> None:
        super().__init__()
        self.sizes, self.library = sizes, library

    def forward(self, x: PerExpert, ids: ExpertIds) -> PerExpert:
        """Multiply the row of each selection, or the row of its token, by the matrix of the selected expert."""
        rows, (n_experts, out, width) = ids.numel(), self.sizes
        if rows > FEW:
            return grouped(lambda expert, expert_rows: self.expert(expert)(expert_rows), x, ids, n_experts)
        x, ids = x.contiguous(), ids.contiguous()
        y = x.new_empty(*ids.shape, out)
        pointers = x.data_ptr(), ids.data_ptr(), y.data_ptr()
        sizes = rows, ids.shape[-1] // x.shape[2], n_experts, out, width
        error_code = self.library.llorch_expert_product(*self.matrix_of(x.dtype), *pointers, *sizes)
        if error_code == 1:
            raise MemoryError(f"experts: cannot allocate memory for {rows} rows")
        if error_code:
            raise IndexError(f"experts: expected expert ids from 0 to {n_experts - 1}, got {ids.tolist()}")
        return y

    def expert(self, number: int) -> nn.Module:
        raise NotImplementedError

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        raise NotImplementedError


class CpuExperts(_ExpertProducts):
    """Kernel of `ExpertLinear`."""

    def __init__(self, weight: Tensor, library: ctypes.CDLL) -> None:
        """Take over the contiguous matrices of an `ExpertLinear`."""
        n_experts, out, width = weight.shape
        super().__init__((n_experts, out, width), library)
        self.weight = weight

    def expert(self, number: int) -> CpuLinear:
        """Return one expert as a linear kernel."""
        return CpuLinear(self.weight[number], None, self.library)

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the kind of the matrix, its address and the kind of the inputs."""
        kind = KINDS[self.weight.dtype]
        return kind, self.weight.data_ptr(), None, None, None, kind


class CpuQuantisedExperts(_ExpertProducts):
    """Kernel of `QuantisedExperts`."""

    def __init__(self, fields: Fields, ggml_type: Kind, n_experts: int, library: ctypes.CDLL) -> None:
        """Take over the stacked fields of all matrices."""
        stacked = CpuQuantisedLinear(fields, ggml_type, None, library)
        super().__init__((n_experts, stacked.out_features // n_experts, stacked.in_features), library)
        self.stacked = stacked

    def expert(self, number: int) -> CpuQuantisedLinear:
        """Return a view of one expert as a linear kernel."""
        rows = slice(number * self.sizes[1], (number + 1) * self.sizes[1])
        fields = {name: field[rows] for name, field in self.stacked.fields.items()}
        return CpuQuantisedLinear(fields, self.stacked.ggml_type, None, self.library, shared=self.stacked.shared)

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the kind of the matrix, its addresses and the kind of the inputs."""
        return self.stacked.matrix_of(dtype)
