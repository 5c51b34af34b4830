"""Rearrangement of bytes and bits of many blocks at once, the largest part of decoding.

NumPy copies 16-byte items with any stride at cache speed, but rows of bytes have a cost per row. So bytes are moved as
items, and bits are processed as one long row of 32-bit words. Allocation would take as long as the work itself: all
arrays are in one scratch memory, which the next chunk reuses.
"""

from collections.abc import Sequence

import numpy as np

SCRATCH_BYTES = 8  # scratch memory per element of a chunk


class Chunk:
    """Blocks of a tensor, with methods to unpack them into contiguous arrays, valid as long as the chunk."""

    def __init__(self, blocks: np.ndarray, scratch: np.ndarray) -> None:
        """Wrap blocks, one per row, and scratch memory of `SCRATCH_BYTES` per element."""
        self.blocks = blocks
        self._scratch = scratch
        self._used = 0

    def field(self, start: int, size: int) -> np.ndarray:
        """Copy `size` bytes from `start` of every block."""
        copied = self._empty(len(self.blocks) * size, np.uint8).reshape(-1, size)
        item_bytes = size & -size if size < 64 else size  # largest power of two that divides it; long rows as rows
        for offset in range(0, size, item_bytes):
            source = self.blocks[:, start + offset : start + offset + item_bytes]
            copied[:, offset : offset + item_bytes].view(f"V{item_bytes}")[...] = source.view(f"V{item_bytes}")
        return copied

    def float16_field(self, start: int) -> np.ndarray:
        """Read a float16 of every block, as float32."""
        return self.blocks[:, start : start + 2].view("<f2")[:, 0].astype(np.float32)

    def bit_fields(self, data: np.ndarray, bits: int, *, place: int = 0) -> list[np.ndarray]:
        """Split contiguous bytes, a multiple of 4, into 8 / bits arrays, lowest bits first, shifted to bit `place`."""
        words = data.reshape(-1).view(np.uint32)
        mask = np.uint32(((1 << bits) - 1) * 0x0101_0101 << place)
        fields = []
        for shift in range(0, 8, bits):
            shifted = self._empty(words.size, np.uint32)
            if shift < place:
                np.left_shift(words, np.uint32(place - shift), out=shifted)
            else:
                np.right_shift(words, np.uint32(shift - place), out=shifted)
            shifted &= mask
            fields.append(shifted.view(np.uint8))
        return fields

    def weave(self, parts: Sequence[np.ndarray], width: int) -> np.ndarray:
        """Interleave `width` bytes (8, or a multiple of 16) of each part; parts are contiguous, of equal size."""
        item = np.dtype(f"V{min(width, 16)}")
        columns = [part.reshape(-1, width).view(item) for part in parts]
        woven = self._empty(sum(part.size for part in parts), np.uint8)
        woven_items = woven.view(item).reshape(len(columns[0]), len(parts), -1)
        for index, column in enumerate(columns):
            for item_index in range(column.shape[1]):
                woven_items[:, index, item_index] = column[:, item_index]
        return woven

    def look_up(self, table: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Replace every key by its table entry; keys must be valid indices."""
        indices = self._empty(keys.size, np.intp)
        indices[...] = keys
        entries = self._empty(keys.size, table.dtype)
        np.take(table, indices, out=entries, mode="clip")  # any other mode makes a copy of `entries`
        return entries

    def _empty(self, count: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """Take an uninitialised array from the chunk's scratch memory, aligned to 64 bytes."""
        start = self._used
        self._used += -(-count * np.dtype(dtype).itemsize // 64) * 64
        return self._scratch[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def write_scaled(codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write contiguous codes times scales, one scale per run, to `out`; returns a view with one run per row."""
    np.copyto(out.reshape(-1), codes.reshape(-1))
    runs = out.reshape(scales.size, -1)
    runs *= scales.reshape(-1, 1)
    return runs
