"""Adam's moments in 8 bits per number: blocks of 256, each with its largest magnitude and a code for every number.

    code     the nearest of 256 values, of x / absmax                         x ~ values[code] * absmax

The values are those of a float whose exponent grows at the cost of its fraction. There are seven decades, the last one
0.1 ... 1; decade i has 2^i values per sign, or 2^(i+1) in the unsigned code book: centers of equal cells. There are
also 0 and 1, but no -1, so a block whose largest magnitude is negative decodes this number 0.7 % too small.

Source: arXiv:2110.02861, arXiv:1511.04561; bitsandbytes/functional.py (`create_dynamic_map`) and, for the nearest code,
csrc/kernels.cu. The CPU kernel of bitsandbytes 0.50 first rounds x / absmax to one of 65536 equal steps, by which a 0
among other numbers decodes to 2e-5 of the largest. Here it decodes to 0.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, UInt8
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256  # numbers that share a largest magnitude
TINY = float(np.finfo(np.float32).tiny)  # a block with a smaller absmax becomes zeros
_DECADES = 7


@dataclass(frozen=True)
class CodeBook:
    """Values of the 256 codes and the thresholds between them."""

    values: Float32[np.ndarray, "256"]  # ascending
    thresholds: Float32[np.ndarray, "255"]  # a number gets the first code with threshold >= number


def code_book(*, signed: bool) -> CodeBook:
    """Return the 256 values for numbers of -1 ... 1 or of 0 ... 1, with thresholds half way between them.

    bitsandbytes uses float32 `linspace`, whose last bits depend on the processor; llorch's values are rounded once.
    """
    positive = [10.0 ** (i + 1 - _DECADES) * _cells(2 ** (i + (not signed))) for i in range(_DECADES)]
    values = np.concatenate([*positive, *(-decade for decade in positive if signed), [0.0, 1.0]]).astype(np.float32)
    values.sort()
    return CodeBook(values, (values[:-1] + values[1:]) * np.float32(0.5))


def _cells(n: int) -> Float64[np.ndarray, " n"]:
    """Return the centers of `n` equal cells of 0.1 ... 1."""
    return 0.1 + 0.9 * (np.arange(n) + 0.5) / n


SIGNED, UNSIGNED = code_book(signed=True), code_book(signed=False)


@dataclass(frozen=True)
class EightBit:
    """Tensor in 8 bits per number; a block whose `absmax` is 0 has only zeros."""

    codes: UInt8[Tensor, "*shape"]
    absmax: Float32[Tensor, " blocks"]


def zeros(like: Float[Tensor, "*shape"]) -> EightBit:
    """Create a tensor of zeros in the shape of another tensor."""
    absmax = torch.zeros(-(-like.numel() // BLOCK), dtype=torch.float32, device=like.device)
    return EightBit(torch.zeros_like(like, dtype=torch.uint8), absmax)


class Codec:
    """Encoder and decoder of a code book on a device."""

    def __init__(self, book: CodeBook, device: torch.device) -> None:
        """Copy the values and the tables of `cells` to a device."""
        self.values = torch.from_numpy(book.values).to(device)
        self.low, self.split, self.high = (torch.from_numpy(table).to(device) for table in cells(book))

    def decode(self, x: EightBit) -> Float32[Tensor, "..."]:
        """Decode codes to numbers."""
        codes = _blocks(x.codes)
        blocks = self.values.index_select(0, codes.flatten().int()).view(codes.shape) * x.absmax[:, None]
        return blocks.flatten()[: x.codes.numel()].view(x.codes.shape)

    def encode(self, x: Float[Tensor, "*shape"], into: EightBit) -> None:
        """Round finite numbers to codes, written to `into`; in a block of zeros all codes are 0."""
        blocks = _blocks(x.float())
        torch.amax(blocks.abs(), -1, out=into.absmax)
        absmax = into.absmax.masked_fill_(into.absmax < TINY, 0)[:, None]
        scaled = torch.where(absmax > 0, blocks * (1 / absmax), -1)  # -1 is below all values, so its code is 0
        cell = (scaled.flatten().view(torch.int32) >> 16) & 0xFFFF
        is_above = scaled.flatten() > self.split.index_select(0, cell)
        codes = torch.where(is_above, self.high.index_select(0, cell), self.low.index_select(0, cell))
        into.codes.copy_(codes[: x.numel()].view(x.shape))


def cells(
    book: CodeBook,
) -> tuple[UInt8[np.ndarray, "65536"], Float32[np.ndarray, "65536"], UInt8[np.ndarray, "65536"]]:
    """Make tables for rounding, faster than a search. A cell has all float32 numbers with the same upper 16 bits.

    A cell has at most one threshold. Returns for each cell the code below the threshold, the threshold (infinite if
    there is none) and the code above it.
    """
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.sort(np.stack([bits, bits | 0xFFFF]).view(np.float32), axis=0)
    low, high = np.searchsorted(book.thresholds, ends)
    split = np.where(low < high, np.append(book.thresholds, np.inf)[low], np.inf).astype(np.float32)
    return low.astype(np.uint8), split, high.astype(np.uint8)


def _blocks(x: Tensor) -> Tensor:
    """Return the flattened tensor in rows of one block, with zeros after its end."""
    return pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
