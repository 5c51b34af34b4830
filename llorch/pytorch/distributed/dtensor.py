"""Operations for tensors that may be sharded (DTensor) or complete.

`axis` is an axis of the mesh, `dim` a dimension of a tensor. A parameter that is sharded twice was first sharded along
the last axis of its mesh (tp), and each shard along the axis before (dp). Importing DTensor takes half a second, so
only a process with sharded tensors imports it.
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
    """Tell if the tensor is a DTensor: other processes may have other parts of it."""
    imported = sys.modules.get("torch.distributed.tensor")
    return imported is not None and isinstance(tensor, imported.DTensor)


def own(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, in the same memory and without gradient."""
    return tensor.to_local() if is_part(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather the complete tensor on every rank; a collective call."""
    return gather_all({"": tensor})[""]


def gather_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather many tensors of one mesh and dtype as `whole` gathers one, with one exchange per axis of the mesh."""
    parts = {name: tensor for name, tensor in tensors.items() if is_part(tensor)}
    if not parts:
        return dict(tensors)
    mesh = next(iter(parts.values())).device_mesh
    complete = {name: own(tensor) for name, tensor in tensors.items()}
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1:
            continue
        placements: dict[str, Any] = {name: tensor.placements[axis] for name, tensor in parts.items()}
        dims: dict[str, int] = {name: p.dim for name, p in placements.items() if not p.is_replicate()}
        sizes = {name: _size_before(parts[name], axis, dim) for name, dim in dims.items()}
        complete |= _gather({name: complete[name] for name in dims}, dims, sizes, mesh.get_group(axis))
    return complete


def like(example: Tensor, part: Tensor) -> Tensor:
    """Make a DTensor from a local part, sharded as the example; return the part if the example is no DTensor."""
    if not is_part(example):
        return part
    layout = {"shape": example.shape, "stride": example.stride(), "run_check": False}
    return type(example).from_local(part, example.device_mesh, example.placements, **layout)


def part_of(complete: Tensor, example: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharded as the example; the part may be empty."""
    if not is_part(example):
        return complete
    mesh = example.device_mesh
    for axis, placement in reversed(list(enumerate(example.placements))):
        if not placement.is_replicate():
            shard: Any = placement  # Shard or _StridedShard, which have no common base class
            chunks, rank = complete.chunk(mesh.size(axis), shard.dim), mesh.get_local_rank(axis)
            complete = chunks[rank] if rank < len(chunks) else complete.narrow(shard.dim, 0, 0)
    return complete


def _size_before(tensor: "DTensor", axis: int, dim: int) -> int:
    """Return the length of a dimension before it was sharded along an axis of the mesh."""
    mesh, size = tensor.device_mesh, tensor.shape[dim]
    for inner_axis in range(mesh.ndim - 1, axis, -1):
        if getattr(tensor.placements[inner_axis], "dim", None) == dim:
            chunk = -(-size // mesh.size(inner_axis))
            size = max(0, min(size - mesh.get_local_rank(inner_axis) * chunk, chunk))
    return size


def _gather(
    parts: Mapping[str, Tensor], dims: Mapping[str, int], sizes: Mapping[str, int], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Gather parts along a dimension of each; all ranks send as much as the rank with the longest parts."""
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
    by_name = torch.stack(received).split([row.numel() for row in rows.values()], 1)
    return {
        name: stacked.reshape(-1, *row.shape[1:])[: sizes[name]].movedim(0, dims[name]).contiguous()
        for (name, row), stacked in zip(rows.items(), by_name, strict=True)
    }
