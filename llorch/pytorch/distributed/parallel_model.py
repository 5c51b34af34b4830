"""Generation with a model split over ranks: each rank loads and computes its part, and all ranks take the same tokens.

All ranks have complete logits and equal random numbers. All ranks take the token of the first rank, so that rounding
cannot make them diverge.

Kernels (faster modules) of a projection, a norm, the rotation, attention or the activation are correct on a rank's
part, which has whole heads. The kernel of a whole block is excluded, because it would not sum the outputs of the ranks.
The kernel of experts is excluded, too, because it does not report its number of experts.
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
from llorch.runtime.launched_rank import local_ranks

WHOLE_ONLY = ("block", "experts")  # kernels that are wrong on a rank's part


class ParallelModel(TorchModel):
    """Tensor-parallel model: every rank runs its part, and all ranks call the same methods in the same order."""

    def __init__(self, weights: Weights, target: Target, module: CausalLM, mesh: DeviceMesh) -> None:
        """Take a module whose matrices were cut when they were loaded; ranks of `dp` do the same work."""
        from llorch.pytorch.distributed.parallel import parallelize  # which imports FSDP and DTensor, in a second

        super().__init__(weights, target, parallelize(module, mesh["tp"]))
        self.ranks = mesh["tp"]
        self._rank_config = of_a_rank(self.config, self.ranks.size())

    @property
    def where(self) -> str:
        """Target and mesh of the model, `torch-cpu-float32-tp2`."""
        return named_on(self.target, self.ranks)

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """Raise UserError, because the factors of the adapter would have to be split, too."""
        raise UserError("tensor parallel: generation cannot split an adapter; merge it first with llorch lora merge")

    def _speed_up(self, decoding: Decoding, adapters: Sequence[str | None]) -> Decoding:
        """See `TorchModel._speed_up`; also make all ranks take the tokens of the first rank."""
        accelerated = super()._speed_up(decoding, adapters)
        accelerated.agree = first_rank_tokens(self.ranks)
        return accelerated


def first_rank_tokens(ranks: DeviceMesh) -> Agree:
    """Return a function that gives every rank the tokens of the first rank and their log probabilities."""

    def agree(token: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
        packed = torch.cat((token.double(), logprob))  # float64 represents every id exactly
        dist.broadcast(packed, group=ranks.get_group(), group_src=0)
        token_of_first, logprob_of_first = packed.chunk(2)
        return token_of_first.to(token.dtype), logprob_of_first

    return agree


def load_parallel(
    path_or_name: str | Path, mesh: DeviceMesh, *, dtype: str = "float32", kernels: Kernels = "auto",
    residency: Residency = "auto", n_tokens: int = 1024,
) -> ParallelModel:  # fmt: skip
    """Open a model on the CPU and keep this rank's part; a weight is complete only until it is cut.

    All ranks pass the same arguments, as for `load_torch`, and then make the same calls. The mesh has an axis `tp`;
    residency `auto` decodes matrices whose blocks do not divide over the ranks.

    Raises:
        UserError: The ranks do not divide the model, or with residency `packed` its blocks.
        MemoryError: The parts of this machine's ranks do not fit in its memory.
    """
    backend, n_ranks = target("cpu", dtype, kernels), axes_of(mesh)["tp"]
    compute_as_named(backend)
    weights = open_weights(find(path_or_name))
    require_split(weights.config, n_ranks)
    requested, n_here = _require_divisible(weights, residency, n_ranks), len(local_ranks(n_ranks))
    from_blocks = any(kind.startswith("packed") for kind in built_kernels(backend))
    choose = partial(require_memory, n_tokens=n_tokens, from_blocks=from_blocks, n_ranks=n_ranks, n_here=n_here)
    storage = Ranks(mesh).first(lambda: choose(weights, backend, requested))  # before any rank uses free memory
    load = load_packed if storage == "packed" else load_dense
    module = load(weights, dtype=backend.dtype, device=backend.device, cut=cut_for(weights.config, mesh))
    speed_up(module, backend, "sdpa", compiled=False, without=WHOLE_ONLY)
    return ParallelModel(weights, backend, module, mesh)


def _require_divisible(weights: Weights, residency: Residency, n_ranks: int) -> Residency:
    """Choose decoded matrices if ranks would split blocks; UserError if they must stay packed."""
    torn = torn_blocks(weights, n_ranks)
    if torn and residency == "packed":
        raise UserError(f"tensor parallel: {torn}; use --weights decoded")
    return "decoded" if torn else residency
