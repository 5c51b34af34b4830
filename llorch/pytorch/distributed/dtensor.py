"""A tensor of which a process has a part, a DTensor, beside one that it has whole: what is the same for both.

A parameter that is cut twice was first cut along the last axis of its mesh, and what came of it along the one before.
DTensor takes half a second to import, so only a process that cuts tensors imports it.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

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


def whole_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Do with many tensors of one mesh and dtype what `whole` does, by one exchange for each axis of the mesh."""
    parts = {name: tensor for name, tensor in tensors.items() if is_part(tensor)}
    if not parts:
        return dict(tensors)
    mesh = next(iter(parts.values())).device_mesh
    joined = {name: own(tensor) for name, tensor in tensors.items()}
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1:
            continue
        cuts: dict[str, Any] = {name: tensor.placements[axis] for name, tensor in parts.items()}
        dims: dict[str, int] = {name: cut.dim for name, cut in cuts.items() if not cut.is_replicate()}
        sizes = {name: _size_before(parts[name], axis, dim) for name, dim in dims.items()}
        joined |= _gathered({name: joined[name] for name in dims}, dims, sizes, mesh.get_group(axis))
    return joined


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
            chunks, rank = complete.chunk(mesh.size(axis), cut.dim), mesh.get_local_rank(axis)
            complete = chunks[rank] if rank < len(chunks) else complete.narrow(cut.dim, 0, 0)
    return complete


def _size_before(tensor: "DTensor", axis: int, dim: int) -> int:
    """Return the length of a dimension before it was cut along an axis of the mesh."""
    mesh, size = tensor.device_mesh, tensor.shape[dim]
    for later in range(mesh.ndim - 1, axis, -1):
        if getattr(tensor.placements[later], "dim", None) == dim:
            chunk = -(-size // mesh.size(later))
            size = max(0, min(size - mesh.get_local_rank(later) * chunk, chunk))
    return size


def _gathered(
    parts: Mapping[str, Tensor], dims: Mapping[str, int], sizes: Mapping[str, int], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Join parts along a dimension of each; all ranks send as much as the one with the longest parts."""
    if not parts:
        return {}
    count = group.size()
    rows: dict[str, Tensor] = {}
    for name, part in parts.items():
        row, longest = part.movedim(dims[name], 0), -(-sizes[name] // count)
        rows[name] = pad(row, (0, 0) * (row.ndim - 1) + (0, longest - len(row)))
    sent = torch.cat([row.flatten() for row in rows.values()])
    received = [torch.empty_like(sent) for _ in range(count)]
    dist.all_gather(received, sent, group=group)
    found = torch.stack(received).split([row.numel() for row in rows.values()], 1)
    return {
        name: one.reshape(-1, *row.shape[1:])[: sizes[name]].movedim(0, dims[name]).contiguous()
        for (name, row), one in zip(rows.items(), found, strict=True)
    }
