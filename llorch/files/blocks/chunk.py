"""Moving bytes and bits of many blocks at once, which is most of the work of decoding.

NumPy copies items of 16 bytes with any stride at the speed of the cache, but pays a price per row for rows of bytes.
So whatever has to be rearranged is moved as items, and whatever can be is worked on as one long row of 32-bit words.
Fresh memory costs as much as the work itself: all results lie in one piece that is used again for the next chunk.
"""

from collections.abc import Sequence

import numpy as np

SCRATCH_BYTES = 8  # that the results may take, for each element of a chunk


class Chunk:
    """Some blocks of a tensor, and what takes them apart. All results are contiguous and last as long as the chunk."""

    def __init__(self, blocks: np.ndarray, scratch: np.ndarray) -> None:
        """Wrap blocks, one per row, and memory for the results, `SCRATCH_BYTES` for each element."""
        self.blocks = blocks
        self._scratch = scratch
        self._used = 0

    def field(self, start: int, size: int) -> np.ndarray:
        """Copy some bytes of every block."""
        copied = self._empty(len(self.blocks) * size, np.uint8).reshape(-1, size)
        item = size & -size if size < 64 else size  # the largest power of two that divides it; long rows as rows
        for offset in range(0, size, item):
            source = self.blocks[:, start + offset : start + offset + item]
            copied[:, offset : offset + item].view(f"V{item}")[...] = source.view(f"V{item}")
        return copied

    def float16_field(self, start: int) -> np.ndarray:
        """Read a float16 of every block, as float32."""
        return self.blocks[:, start : start + 2].view("<f2")[:, 0].astype(np.float32)

    def bit_fields(self, data: np.ndarray, bits: int, *, place: int = 0) -> list[np.ndarray]:
        """Split contiguous bytes, a multiple of 4, into 8 / bits flat arrays, lowest first, moved to bit `place`."""
        words = data.reshape(-1).view(np.uint32)
        mask = np.uint32(((1 << bits) - 1) * 0x0101_0101 << place)
        fields = []
        for shift in range(0, 8, bits):
            part = self._empty(words.size, np.uint32)
            if shift < place:
                np.left_shift(words, np.uint32(place - shift), out=part)
            else:
                np.right_shift(words, np.uint32(shift - place), out=part)
            part &= mask
            fields.append(part.view(np.uint8))
        return fields

    def weave(self, parts: Sequence[np.ndarray], width: int) -> np.ndarray:
        """Take `width` bytes (8, or a multiple of 16) of each part in turn; parts are contiguous and equally long."""
        item = np.dtype(f"V{min(width, 16)}")
        columns = [part.reshape(-1, width).view(item) for part in parts]
        woven = self._empty(sum(part.size for part in parts), np.uint8)
        items = woven.view(item).reshape(len(columns[0]), len(parts), -1)
        for index, column in enumerate(columns):
            for place in range(column.shape[1]):
                items[:, index, place] = column[:, place]
        return woven

    def look_up(self, table: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Replace every key, none beyond the table, by the entry of the table."""
        indices = self._empty(keys.size, np.intp)
        indices[...] = keys
        found = self._empty(keys.size, table.dtype)
        np.take(table, indices, out=found, mode="clip")  # any other mode makes a copy of `found`
        return found

    def _empty(self, count: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """Take an uninitialised array from the chunk's scratch memory, aligned to 64 bytes."""
        start = self._used
        self._used += -(-count * np.dtype(dtype).itemsize // 64) * 64
        return self._scratch[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def write_scaled(codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write contiguous codes times scales, one for every equally long run, to `out`; viewed with a run per row."""
    np.copyto(out.reshape(-1), codes.reshape(-1))
    runs = out.reshape(scales.size, -1)
    runs *= scales.reshape(-1, 1)
    return runs
