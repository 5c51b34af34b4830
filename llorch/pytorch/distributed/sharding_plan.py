"""Sharding of a model over tensor-parallel ranks: the cut of each weight, and models that cannot be cut.

A rank has some output rows of q, k, v, gate and up, that is whole heads and a part of the intermediate width, and the
matching input columns of o and down. Experts are distributed one by one. Everything else is replicated on every rank.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llorch.families.config import ModelConfig
from llorch.families.layers import Layer
from llorch.files import Weights
from llorch.files.tensor_names import inventory
from llorch.pytorch.distributed.launch import axes_of
from llorch.pytorch.load import Cut, all_of, path_of
from llorch.pytorch.stored_kinds import block_size, kind_of
from llorch.runtime.errors import UserError

# paths of matrices in a layer; COLUMNS are cut by output rows, ROWS by input columns, EXPERTS by expert
_FEED = ("mlp", "mlp.shared_expert")
COLUMNS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    *(f"{m}.{p}_proj" for m in _FEED for p in ("gate", "up")),
)  # fmt: skip
ROWS = ("self_attn.o_proj", *(f"{module}.down_proj" for module in _FEED))
EXPERTS = tuple(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down"))


def cannot_split(config: ModelConfig, n_ranks: int) -> str | None:
    """Return the reason why the layers of a model cannot be split over `n_ranks` ranks; None if they can."""
    if n_ranks == 1:
        return None
    if any(layer not in (Layer(), Layer(experts=True)) for layer in config.layers):
        return f"expected dense layers or layers with experts, got layers of {config.family}"
    sizes = {"heads": config.n_heads, "KV heads": config.n_kv_heads}
    if not all(config.layer(i).experts for i in range(config.n_layers)):
        sizes["inner width"] = config.intermediate_size
    if config.experts is not None:
        sizes["width of the shared expert"] = config.experts.shared_size
        if config.experts.n_experts < n_ranks:
            return f"expected at least {n_ranks} experts, one for each rank, got {config.experts.n_experts}"
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % n_ranks]
    return f"expected sizes divisible by {n_ranks} ranks, got {', '.join(uneven)}" if uneven else None


def require_split(config: ModelConfig, n_ranks: int) -> None:
    """Raise UserError with the reason of `cannot_split`, if there is one."""
    if reason := cannot_split(config, n_ranks):
        raise UserError(f"tensor parallel: {reason}")


def torn_blocks(weights: Weights, n_ranks: int) -> str | None:
    """Return the reason why packed matrices cannot be cut between blocks; None if they can."""
    for weight in inventory(weights.config).values():
        kind, path = kind_of(weights, weight.name), path_of(weight.name).removesuffix(".weight")
        if kind is not None and path.endswith(EXPERTS) and n_ranks > 1:
            return f"{weight.name}: llorch cannot split packed experts over tensor-parallel processes"
        if kind is not None and cut_axis(path_of(weight.name)) == 1:
            size = block_size(weights, weight.name)
            if weight.shape[-1] // size % n_ranks:
                n_blocks = f"{weight.shape[-1] // size} blocks of {size} columns ({kind.name})"
                return f"{weight.name}: expected a number of blocks divisible by {n_ranks} ranks, got {n_blocks}"
    return None


def cut_axis(path: str) -> int | None:
    """Return the axis along which a weight is cut, by its attribute path; None if it is replicated."""
    matrix, _, kind = path.rpartition(".")
    if matrix.endswith((*COLUMNS, *EXPERTS)):
        return 0
    return 1 if matrix.endswith(ROWS) and kind != "bias" else None


def of_a_rank(config: ModelConfig, n_ranks: int) -> ModelConfig:
    """Return the configuration with one rank's heads and intermediate width, for the size of its cache and memory."""
    sizes = {name: getattr(config, name) // n_ranks for name in ("n_heads", "n_kv_heads", "intermediate_size")}
    return replace(config, **sizes)


def cut_for(config: ModelConfig, mesh: DeviceMesh) -> Cut:
    """Return the function that cuts each weight as it is loaded, so that no rank has the whole model."""
    if (ranks := sharing_layers(mesh)) is None:
        return all_of
    require_split(config, ranks.size())
    return partial(part_of_rank, ranks=ranks)


def sharing_layers(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of the mesh with the tensor-parallel ranks if there are several; else None."""
    return mesh["tp"] if axes_of(mesh).get("tp", 1) > 1 else None


def part_of_rank(path: str, complete: Tensor, ranks: DeviceMesh) -> Tensor:
    """Return the rank's part of a weight, or of a field of a packed weight, by the attribute path of its matrix.

    The bias of o or down is added once to the sum over ranks: complete on the first rank, zero on the others. Raises
    UserError if the size is not divisible; experts may be uneven.
    """
    rank, n_ranks, axis = ranks.get_local_rank(), ranks.size(), cut_axis(path)
    if axis is None:
        is_added = path.endswith(tuple(f"{matrix}.bias" for matrix in ROWS))
        return torch.zeros_like(complete) if is_added and rank else complete
    if (size := complete.shape[axis]) % n_ranks and not path.removesuffix(".weight").endswith(EXPERTS):
        raise UserError(f"tensor parallel: {path}: expected a size divisible by {n_ranks} ranks, got {size}")
    return complete.chunk(n_ranks, axis)[rank].clone()
