"""Products with the matrices of chosen experts on the CPU: a few rows in one call, many expert by expert.

Few rows are each multiplied by the matrix of their expert, dense or packed, so that a token costs what its experts
take; where many tokens share experts, the rows of one go to it together, as those of any projection.
"""

import ctypes

import torch
from torch import Tensor, nn

from llorch.pytorch.kernels.cpu.linear import KINDS, CpuLinear
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.kernels.packing import Fields, Kind
from llorch.pytorch.models.experts import Chosen, PerExpert, grouped

FEW = 32  # rows up to which one call for all is faster


class _Chosen(nn.Module):
    """The base of dense and packed experts; `matrix_of(dtype)` has the arguments of the compiled function."""

    def __init__(self, sizes: tuple[int, int, int], library: ctypes.CDLL) -> None:
        super().__init__()
        self.sizes, self.library = sizes, library

    def forward(self, x: PerExpert, ids: Chosen) -> PerExpert:
        """Multiply the row of each choice, or the one row of its token, by the matrix of the chosen expert."""
        rows, (n_experts, out, width) = ids.numel(), self.sizes
        if rows > FEW:
            return grouped(lambda expert, some: self.expert(expert)(some), x, ids, n_experts)
        x, ids = x.contiguous(), ids.contiguous()
        y = x.new_empty(*ids.shape, out)
        pointers = x.data_ptr(), ids.data_ptr(), y.data_ptr()
        sizes = rows, ids.shape[-1] // x.shape[2], n_experts, out, width
        failed = self.library.llorch_expert_product(*self.matrix_of(x.dtype), *pointers, *sizes)
        if failed == 1:
            raise MemoryError(f"experts: cannot allocate memory for {rows} rows")
        if failed:
            raise IndexError(f"experts: expected expert ids from 0 to {n_experts - 1}, got {ids.tolist()}")
        return y

    def expert(self, number: int) -> nn.Module:
        raise NotImplementedError

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        raise NotImplementedError


class CpuExperts(_Chosen):
    """See `ExpertLinear`."""

    def __init__(self, weight: Tensor, library: ctypes.CDLL) -> None:
        """Take over the contiguous matrices of a plain one."""
        n_experts, out, width = weight.shape
        super().__init__((n_experts, out, width), library)
        self.weight = weight

    def expert(self, number: int) -> CpuLinear:
        """Return one of the experts."""
        return CpuLinear(self.weight[number], None, self.library)

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the kind, addresses, and the kind of what is multiplied."""
        kind = KINDS[self.weight.dtype]
        return kind, self.weight.data_ptr(), None, None, None, kind


class CpuQuantisedExperts(_Chosen):
    """See `QuantisedExperts`."""

    def __init__(self, fields: Fields, ggml_type: Kind, n_experts: int, library: ctypes.CDLL) -> None:
        """Take over the fields of all matrices, one below the other."""
        self_all = CpuQuantisedLinear(fields, ggml_type, None, library)
        super().__init__((n_experts, self_all.out_features // n_experts, self_all.in_features), library)
        self.all = self_all

    def expert(self, number: int) -> CpuQuantisedLinear:
        """Return a view of one of the experts."""
        rows = slice(number * self.sizes[1], (number + 1) * self.sizes[1])
        fields = {name: field[rows] for name, field in self.all.fields.items()}
        return CpuQuantisedLinear(fields, self.all.ggml_type, None, self.library, shared=self.all.shared)

    def matrix_of(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Return the kind, addresses, and the kind of what is multiplied."""
        return self.all.matrix_of(dtype)
