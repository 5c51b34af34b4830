"""Products with the matrices of selected experts on the CPU: a few rows in one call, many rows expert by expert.

Each of a few rows is multiplied by the matrix of its expert, dense or packed, so a token reads only its experts'
weights. If many tokens share experts, an expert multiplies all of its rows in one product, as any projection does.
"""

import ctypes

from torch import nn

from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.models.experts import ExpertIds, PerExpert, grouped

FEW = 32  # up to this many rows, one call for all is faster


class CpuExperts(nn.Module):
    """Kernel of `ExpertLinear` and of `QuantisedExperts`."""

    def __init__(self, stacked: CpuLinear | CpuQuantisedLinear, n_experts: int, library: ctypes.CDLL) -> None:
        """Take over a linear kernel whose rows are those of all experts."""
        super().__init__()
        self.stacked, self.library = stacked, library
        self.sizes = n_experts, stacked.out_features // n_experts, stacked.in_features

    def forward(self, x: PerExpert, ids: ExpertIds) -> PerExpert:
        """Multiply the row of each selection, or the row of its token, by the matrix of the selected expert."""
        rows, (n_experts, out, width) = ids.numel(), self.sizes
        if rows > FEW:
            return grouped(lambda expert, expert_rows: self.expert(expert)(expert_rows), x, ids, n_experts)
        x, ids = x.contiguous(), ids.contiguous()
        y = x.new_empty(*ids.shape, out)
        pointers = x.data_ptr(), ids.data_ptr(), y.data_ptr()
        sizes = rows, ids.shape[-1] // x.shape[2], n_experts, out, width
        error_code = self.library.llorch_expert_product(*self.stacked.matrix_of(x.dtype), *pointers, *sizes)
        if error_code == 1:
            raise MemoryError(f"experts: cannot allocate memory for {rows} rows")
        if error_code:
            raise IndexError(f"experts: expected expert ids from 0 to {n_experts - 1}, got {ids.tolist()}")
        return y

    def expert(self, number: int) -> CpuLinear | CpuQuantisedLinear:
        """Return a view of one expert as a linear kernel."""
        return self.stacked.part(slice(number * self.sizes[1], (number + 1) * self.sizes[1]))
