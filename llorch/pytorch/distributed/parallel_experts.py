"""Experts split over ranks: each has some of them whole, and computes those for the tokens that chose them.

The router is whole on every rank, and so is what the experts of all ranks make together, so that all ranks mix alike.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llorch.pytorch.causal_lm import Hidden, Keep
from llorch.pytorch.models.experts import Chosen, ExpertsModule, PerExpert


class OwnExperts(ExpertsModule):
    """The experts of a rank, with the interface of all of them; gives zeros for choices of other ranks' experts."""

    def __init__(self, experts: ExpertsModule, first: int) -> None:
        """Take over the modules of experts whose stacks were cut; `first` is the number of the first one."""
        nn.Module.__init__(self)
        for name, child in experts.named_children():
            setattr(self, name, child)
        self.act = experts.act
        self.first = first

    def forward(self, h: Hidden | PerExpert, ids: Chosen, keep: Keep) -> PerExpert:
        """Compute the outputs of the chosen experts that are on this rank, and zeros for the others.

        An expert is given its token, or its share of the token.
        """
        mine = (ids >= self.first) & (ids < self.first + self.gate_proj.n_experts)
        x = h if h.dim() > ids.dim() else h[:, :, None].expand(*ids.shape, -1)

        def keep_all(name: str, rows: Tensor) -> Tensor:
            return keep(name, _among_zeros(rows, mine))[mine][None, :, None]

        chosen = (ids - self.first)[mine][None, :, None]  # (1, rows, 1): the choices that are computed here
        return _among_zeros(super().forward(x[mine][None, :, None], chosen, keep_all), mine)


def _among_zeros(rows: Tensor, mine: Tensor) -> PerExpert:
    """Put the rows of some choices at their places in a tensor of all choices; other rows are zero."""
    return rows.new_zeros(*mine.shape, rows.shape[-1]).masked_scatter(mine[..., None], rows)


def split_experts(layer: Any, ranks: DeviceMesh, n_experts: int, sum_over: Callable[[Tensor], Tensor]) -> None:
    """Let a layer whose stacks of experts were cut ask those that are here, and sum what all ranks make."""
    first = int(torch.arange(n_experts).chunk(ranks.size())[ranks.get_local_rank()][0])
    layer.mlp.experts = OwnExperts(layer.mlp.experts, first)
    layer.mlp.experts.register_forward_hook(_summed_by(sum_over))


def _summed_by(sum_over: Callable[[Tensor], Tensor]) -> Any:
    return lambda _, args, part: sum_over(part)
