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
    """Memory for the weights of one model. It is freed with the last tensor that lies in it."""

    def __init__(self) -> None:
        """Start without memory."""
        self._chunk: mmap.mmap | None = None
        self._taken = 0

    def copied(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors of the CPU into large pages; small ones stay, or all if there are no such pages."""
        return {name: self._copied(field) for name, field in fields.items()}

    def _copied(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu" or size < _LEAST or not self._has_room(size):
            return tensor
        start, self._taken = self._taken, self._taken + -(-size // _LINE) * _LINE
        room = torch.frombuffer(self._chunk, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return room.view(tensor.shape).copy_(tensor)

    def _has_room(self, size: int) -> bool:
        """Map another chunk if this one is too full; False where the system has no large pages or no memory."""
        if self._chunk is not None and self._taken + size <= len(self._chunk):
            return True
        try:
            chunk = mmap.mmap(-1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            return False
        self._chunk, self._taken = chunk, 0
        return True
