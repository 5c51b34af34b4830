"""Weights in memory pages of 2 MB, which Linux gives to memory that asks for them.

A product with a packed matrix reads all of its bytes, one after the other. In pages of 4 kB the processor looks up the
place of a page for every 64 lines that it fetches, and fetches no line ahead beyond a page. Source: madvise(2),
MADV_HUGEPAGE.
"""

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK = 1 << 26  # bytes that are mapped at once; those that nothing was copied to take no memory
_LEAST = 1 << 14  # bytes of a tensor that is worth a copy
_LINE = 64  # bytes of a line of the processor's cache


class LargePages:
    """Memory for the weights of one model. It is freed with this object and the last tensor that lies in it."""

    def __init__(self) -> None:
        """Start without memory."""
        self._chunks: list[tuple[int, mmap.mmap]] = []  # address, memory
        self._taken = 0  # bytes of the last chunk

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Make a tensor of the CPU, still to be written; in ordinary memory if it is small or there are no pages."""
        room = self._room(torch.Size(shape), dtype)
        return torch.empty(shape, dtype=dtype) if room is None else room

    def copied(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors of the CPU into large pages.

        Small ones stay, those that `empty` has made, and all of them if there are no such pages.
        """
        return {name: self._copied(field) for name, field in fields.items()}

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or self._holds(tensor):
            return tensor
        room = self._room(tensor.shape, tensor.dtype)
        return tensor if room is None else room.copy_(tensor)

    def _holds(self, tensor: Tensor) -> bool:
        return any(address <= tensor.data_ptr() < address + len(chunk) for address, chunk in self._chunks)

    def _room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Take memory for a tensor; None for a small one, or where the system has no large pages or no memory."""
        size = shape.numel() * dtype.itemsize
        if size < _LEAST or not self._has_room(size):
            return None
        start, self._taken = self._taken, self._taken + -(-size // _LINE) * _LINE
        return torch.frombuffer(self._chunks[-1][1], dtype=dtype, count=shape.numel(), offset=start).view(shape)

    def _has_room(self, size: int) -> bool:
        """Map another chunk if the last one is too full; False where that fails."""
        if self._chunks and self._taken + size <= len(self._chunks[-1][1]):
            return True
        try:
            chunk = mmap.mmap(-1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            return False
        self._chunks.append((torch.frombuffer(chunk, dtype=torch.uint8).data_ptr(), chunk))
        self._taken = 0
        return True
