"""The 8-bit codec of `llorch.train.eight_bit` on tensors: the same codes, in place, on any device."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn.functional import pad

from llorch.train.eight_bit import BLOCK, TINY, CodeBook


@dataclass(frozen=True)
class EightBit:
    """A tensor in 8 bits a number; a block whose `absmax` is 0 holds zeros."""

    codes: UInt8[Tensor, "*shape"]
    absmax: Float32[Tensor, " blocks"]


def zeros(like: Float[Tensor, "*shape"]) -> EightBit:
    """A tensor of zeros in the shape of another."""
    absmax = torch.zeros(-(-like.numel() // BLOCK), dtype=torch.float32, device=like.device)
    return EightBit(torch.zeros_like(like, dtype=torch.uint8), absmax)


class Codec:
    """A code book on a device."""

    def __init__(self, book: CodeBook, device: torch.device) -> None:
        """Copy a book to a device."""
        self.values = torch.from_numpy(book.values).to(device)
        self.low, self.split, self.high = (torch.from_numpy(table).to(device) for table in cells(book))

    def decode(self, x: EightBit) -> Float32[Tensor, "..."]:
        """The numbers that codes stand for."""
        codes = _blocks(x.codes)
        blocks = self.values.index_select(0, codes.flatten().int()).view(codes.shape) * x.absmax[:, None]
        return blocks.flatten()[: x.codes.numel()].view(x.codes.shape)

    def encode(self, x: Float[Tensor, "*shape"], into: EightBit) -> None:
        """Round finite numbers to codes, written to `into`; in a block of zeros all codes are 0."""
        blocks = _blocks(x.float())
        torch.amax(blocks.abs(), -1, out=into.absmax)
        absmax = into.absmax.masked_fill_(into.absmax < TINY, 0)[:, None]
        scaled = torch.where(absmax > 0, blocks * (1 / absmax), -1)  # below all codes
        cell = (scaled.flatten().view(torch.int32) >> 16) & 0xFFFF
        above = scaled.flatten() > self.split.index_select(0, cell)
        codes = torch.where(above, self.high.index_select(0, cell), self.low.index_select(0, cell))
        into.codes.copy_(codes[: x.numel()].view(x.shape))


def cells(
    book: CodeBook,
) -> tuple[UInt8[np.ndarray, "65536"], Float32[np.ndarray, "65536"], UInt8[np.ndarray, "65536"]]:
    """Tables by the upper 16 bits of a float32, faster than a search: such a cell has at most one threshold.

    The code below the threshold of each cell, the threshold, infinite where there is none, and the code above.
    """
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.sort(np.stack([bits, bits | 0xFFFF]).view(np.float32), axis=0)
    low, high = np.searchsorted(book.thresholds, ends)
    split = np.where(low < high, np.append(book.thresholds, np.inf)[low], np.inf).astype(np.float32)
    return low.astype(np.uint8), split, high.astype(np.uint8)


def _blocks(x: Tensor) -> Tensor:
    """The flattened tensor in rows of one block, zeros behind its end."""
    return pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
