"""Generation with a model split over ranks: every rank loads its part alone, computes it, and takes the same tokens.

All ranks have whole logits and draw by the same numbers. The choice of the first one is the choice of all, so that no
rounding can part them.

Kernels that replace a projection, a norm, the rotation, attention or the activation are right on a part: they see whole
heads, or numbers one by one. The kernel of a whole block is left out, because it would not sum the results of the
ranks. The kernel of experts is left out too, because it does not tell how many experts there are.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights, open_weights
from llorch.files.hub import find
from llorch.files.residency import Residency
from llorch.lora.adapter import Adapter
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.decoding import Agree, Decoding
from llorch.pytorch.device import Kernels, Target, compute_as_named, target
from llorch.pytorch.distributed.launch import Ranks, axes_of, named_on
from llorch.pytorch.distributed.sharding_plan import cut_for, of_a_rank, require_split, torn_blocks
from llorch.pytorch.kernels.kernel_selection import built_kernels, speed_up
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.memory import require_memory
from llorch.pytorch.model import TorchModel
from llorch.runtime.errors import UserError
from llorch.runtime.launched_rank import ranks_here

WHOLE_ONLY = ("block", "experts")  # kernels that are wrong on a part


class ParallelModel(TorchModel):
    """A model of which every rank runs its part: all ranks call the same methods in the same order."""

    def __init__(self, weights: Weights, target: Target, module: CausalLM, mesh: DeviceMesh) -> None:
        """Take a module whose matrices were cut as they were loaded; ranks of `dp` do the same as each other."""
        from llorch.pytorch.distributed.parallel import parallelize  # which imports FSDP and DTensor, in a second

        super().__init__(weights, target, parallelize(module, mesh["tp"]))
        self.ranks = mesh["tp"]
        self._config_here = of_a_rank(self.config, self.ranks.size())

    @property
    def where(self) -> str:
        """The target and the mesh of the model, `torch-cpu-float32-tp2`."""
        return named_on(self.target, self.ranks)

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """Refuse it (ValueError): the factors would have to be cut, too."""
        raise UserError("tensor parallel: generation cannot split an adapter; merge it first with llorch lora merge")

    def _fast(self, decoding: Decoding, adapters: Sequence[str | None]) -> Decoding:
        """Add fast steps, and let all ranks take the tokens of the first rank."""
        made = super()._fast(decoding, adapters)
        made.agree = of_the_first(self.ranks)
        return made


def of_the_first(ranks: DeviceMesh) -> Agree:
    """Return a function that gives every rank the tokens of the first rank and their log probabilities."""

    def agree(token: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((token.double(), logprob))  # a float64 holds every id
        dist.broadcast(both, group=ranks.get_group(), group_src=0)
        token_of_first, logprob_of_first = both.chunk(2)
        return token_of_first.to(token.dtype), logprob_of_first

    return agree


def load_parallel(
    path_or_name: str | Path,
    mesh: DeviceMesh,
    *,
    dtype: str = "float32",
    kernels: Kernels = "auto",
    residency: Residency = "auto",
    n_tokens: int = 1024,
) -> ParallelModel:
    """Open a model on the CPU of which this rank keeps its part; a weight is whole only until it is cut.

    All ranks give the same arguments, those of `load_torch`, and then ask the model for the same. The mesh has an axis
    `tp`; `auto` decodes matrices whose blocks the ranks do not divide.

    Raises:
        ValueError: The ranks do not divide the model, or with `packed` its blocks.
        MemoryError: The parts of the ranks of this machine would not fit together.
    """
    at, n_ranks = target("cpu", dtype, kernels), axes_of(mesh)["tp"]
    compute_as_named(at)
    weights = open_weights(find(path_or_name))
    require_split(weights.config, n_ranks)
    form, n_here = _divided(weights, residency, n_ranks), len(ranks_here(n_ranks))
    from_blocks = any(kind.startswith("packed") for kind in built_kernels(at))
    choose = partial(require_memory, n_tokens=n_tokens, from_blocks=from_blocks, n_ranks=n_ranks, n_here=n_here)
    chosen = Ranks(mesh).first(lambda: choose(weights, at, form))  # before any rank takes what is free
    load = load_packed if chosen == "packed" else load_dense
    module = load(weights, dtype=at.dtype, device=at.device, cut=cut_for(weights.config, mesh))
    speed_up(module, at, "sdpa", compiled=False, without=WHOLE_ONLY)
    return ParallelModel(weights, at, module, mesh)


def _divided(weights: Weights, residency: Residency, n_ranks: int) -> Residency:
    """Decode matrices if ranks do not divide their blocks; raise ValueError if they have to stay packed."""
    torn = torn_blocks(weights, n_ranks)
    if torn and residency == "packed":
        raise UserError(f"tensor parallel: {torn}; use --weights decoded")
    return "decoded" if torn else residency
