"""A tensor of which a process has a part, a DTensor, beside one that it has whole: what is the same for both.

A parameter that is cut twice was first cut along the last axis of its mesh, and what came of it along the one before.
DTensor takes half a second to import, so only a process that cuts tensors imports it.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether other processes may have more of the tensor."""
    imported = sys.modules.get("torch.distributed.tensor")
    return imported is not None and isinstance(tensor, imported.DTensor)


def own(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has, in the same memory; the part has no gradient."""
    return tensor.to_local() if is_part(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Join the parts of a tensor on every rank; all ranks must call this together."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def like(example: Tensor, part: Tensor) -> Tensor:
    """Make a DTensor of a part of another tensor that is cut as the example is; a plain example changes nothing."""
    if not is_part(example):
        return part
    kind = {"shape": example.shape, "stride": example.stride(), "run_check": False}
    return type(example).from_local(part, example.device_mesh, example.placements, **kind)


def part_of(complete: Tensor, example: Tensor) -> Tensor:
    """Return this process's part of a tensor that is to be cut as the example is; the part may be empty."""
    if not is_part(example):
        return complete
    mesh = example.device_mesh
    for axis, placement in reversed(list(enumerate(example.placements))):
        if not placement.is_replicate():
            cut: Any = placement  # Shard or _StridedShard, which are no relatives
            complete = _chunk_of(complete, mesh.size(axis), cut.dim, mesh.get_local_rank(axis))
    return complete


def _chunk_of(tensor: Tensor, count: int, dim: int, number: int) -> Tensor:
    """Return one of some chunks as torch cuts them; the last ones may be shorter or empty."""
    chunks = tensor.chunk(count, dim)
    return chunks[number] if number < len(chunks) else tensor.narrow(dim, 0, 0)
