"""A model split over the ranks of a device mesh, outside the page, which does not know of it.

Tensor parallel: of q, k, v, gate and up each rank holds some output rows, so that it has whole heads and a part of the
inner width; of o and down it holds the input columns that belong to them, and the parts of the result are summed over
ranks. Norms, embedding and logits are whole on every rank.

Source: arXiv:1909.08053; torch.distributed.tensor.parallel.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from llorch.architecture import Layer
from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, Keep, keep_nothing
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel
from llorch.stages import BY_NAME

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
SPLIT = frozenset({"q_width", "kv_width", "heads", "kv_heads", "inter"})  # axes of stages of which a rank has a part


def parallelize(module: CausalLM, mesh: DeviceMesh) -> CausalLM:
    """Leave each rank its part of a dense model, in place; `keep` is shown whole stages on every rank.

    Args:
        module: The page with its plain leaves, the same on every rank.
        mesh: One axis, of the ranks that share a layer.

    Returns:
        The module.

    Raises:
        ValueError: The ranks do not divide the heads or the inner width, or a layer is not dense.
    """
    if reason := cannot_split(module.config, mesh.size()):
        raise ValueError(f"tensor parallel: {reason}")
    plan = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
    for layer in module.model.layers:
        parallelize_module(layer, mesh, plan)
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, _with_whole_stages(kwargs, mesh)), with_kwargs=True)
    return module


def cannot_split(config: ModelConfig, n_ranks: int) -> str | None:
    """Why a model cannot be split over so many ranks."""
    if any(layer != Layer() for layer in config.layers):
        return f"expected layers of the dense page, got those of {config.family}"
    sizes = {"heads": config.n_heads, "KV heads": config.n_kv_heads, "inner width": config.intermediate_size}
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % n_ranks]
    return f"expected sizes that {n_ranks} ranks divide, got {', '.join(uneven)}" if uneven else None


def of_a_rank(config: ModelConfig, n_ranks: int) -> ModelConfig:
    """The heads that a rank has, as its cache is to hold them."""
    return replace(config, n_heads=config.n_heads // n_ranks, n_kv_heads=config.n_kv_heads // n_ranks)


class ParallelModel(TorchModel):
    """A model of which every rank runs its part: all ranks call the same methods in the same order."""

    def __init__(self, weights: Weights, target: Target, module: CausalLM, mesh: DeviceMesh) -> None:
        """Split a module that has its weights; for the errors see `parallelize`."""
        super().__init__(weights, target, parallelize(module, mesh))
        self.n_ranks = mesh.size()

    def new_cache(self, batch: int, n_slots: int, first_position: int = 0) -> Cache:
        """An empty cache for the heads of this rank."""
        kind = {"dtype": self.target.dtype, "device": self.target.device}
        config = of_a_rank(self.config, self.n_ranks)
        return Cache(config, batch=batch, n_slots=n_slots, first_position=first_position, **kind)


def _with_whole_stages(kwargs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    keep = kwargs.get("keep", keep_nothing)
    return kwargs if keep is keep_nothing else kwargs | {"keep": _of_whole_stages(keep, mesh)}


def _of_whole_stages(keep: Keep, mesh: DeviceMesh) -> Keep:
    """Gathers a stage of which every rank has a part, and goes on with this rank's part of what `keep` gives back."""

    def shown(name: str, part: Tensor) -> Tensor:
        axes = ("batch", *BY_NAME[name.rpartition(".")[2]].axes.split())
        axis = next((at for at, axis in enumerate(axes) if axis in SPLIT), None)
        if axis is None:
            return keep(name, part)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
        whole = torch.cat(parts, axis)
        made = keep(name, whole)
        return part if made is whole else made.chunk(mesh.size(), axis)[mesh.get_local_rank()]

    return shown
