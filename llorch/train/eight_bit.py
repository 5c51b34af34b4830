"""Adam's moments in 8 bits a number: blocks of 256, each with its largest magnitude and a code for every number.

    code     the nearest of 256 values, of x / absmax                         x ~ values[code] * absmax

The values are those of a float whose exponent grows at the cost of its fraction. There are seven decades, the last one
0.1 ... 1; decade i has 2^i values of each sign, or 2^(i+1) in the book without signs: middles of even cells. With them
come 0 and 1, and no -1, so a block whose largest magnitude is negative gets that number back 0.7 % short.

The update uses the new moments before they are rounded. Tensors of less than 4096 numbers keep float32 moments.

Source: arXiv:2110.02861, arXiv:1511.04561; bitsandbytes/functional.py (`create_dynamic_map`) and, for the nearest code,
csrc/kernels.cu. The CPU kernel of bitsandbytes 0.50 first rounds x / absmax to one of 65536 even steps, by which a 0
beside other numbers comes back as 2e-5 of the largest one. Here it comes back as 0.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from llorch.train.adamw import moments, moved

BLOCK = 256  # numbers that share a largest magnitude
MIN_SIZE = 4096  # smaller tensors keep float32 moments
TINY = float(np.finfo(np.float32).tiny)  # a block whose largest magnitude is below holds zeros
_DECADES = 7


@dataclass(frozen=True)
class CodeBook:
    """What codes stand for."""

    values: Float32[np.ndarray, "256"]  # ascending
    thresholds: Float32[np.ndarray, "255"]  # a number gets the first code whose threshold is not below it


@dataclass(frozen=True)
class Quantised:
    """A tensor in 8 bits a number; a block whose `absmax` is 0 holds zeros."""

    codes: UInt8[np.ndarray, "*shape"]
    absmax: Float32[np.ndarray, " blocks"]


def code_book(*, signed: bool) -> CodeBook:
    """The 256 values for numbers of -1 ... 1 or of 0 ... 1, with thresholds half way between them.

    bitsandbytes makes its grid with torch's float32 `linspace`, whose last bits depend on the processor; ours are
    rounded once.
    """
    positive = [10.0 ** (i + 1 - _DECADES) * _cells(2 ** (i + (not signed))) for i in range(_DECADES)]
    values = np.concatenate([*positive, *(-part for part in positive if signed), [0.0, 1.0]]).astype(np.float32)
    values.sort()
    return CodeBook(values, (values[:-1] + values[1:]) * np.float32(0.5))


def _cells(n: int) -> Float64[np.ndarray, " n"]:
    """Middles of `n` even cells of 0.1 ... 1."""
    return 0.1 + 0.9 * (np.arange(n) + 0.5) / n


SIGNED, UNSIGNED = code_book(signed=True), code_book(signed=False)


def zeros(shape: tuple[int, ...]) -> Quantised:
    """A tensor of zeros."""
    return Quantised(np.zeros(shape, np.uint8), np.zeros(-(-int(np.prod(shape)) // BLOCK), np.float32))


def quantise(x: Float[np.ndarray, "*shape"], book: CodeBook) -> Quantised:
    """Round finite numbers to codes, blocks counted over the flattened tensor.

    Throughout a block of zeros the code is 0, as in bitsandbytes.
    """
    flat = x.reshape(-1).astype(np.float32)
    blocks = np.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(-1)
    absmax[absmax < TINY] = 0
    inverse = np.divide(np.float32(1), absmax, out=np.zeros_like(absmax), where=absmax > 0)
    codes = np.searchsorted(book.thresholds, blocks * inverse[:, None]).astype(np.uint8)
    codes[absmax == 0] = 0
    return Quantised(codes.reshape(-1)[: len(flat)].reshape(x.shape), absmax)


def dequantise(x: Quantised, book: CodeBook) -> Float32[np.ndarray, "..."]:
    """The numbers that codes stand for."""
    absmax = np.repeat(x.absmax, BLOCK)[: x.codes.size].reshape(x.codes.shape)
    return book.values[x.codes] * absmax


def adamw_8bit_step(
    param: Float[np.ndarray, "*shape"],
    grad: Float[np.ndarray, "*shape"],
    m: Quantised,
    v: Quantised,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Float[np.ndarray, "*shape"], Quantised, Quantised]:
    """One step of one tensor as `llorch.train.adamw.adamw_step`; m is in the signed book, v in the unsigned one."""
    new_m, new_v = moments(grad, dequantise(m, SIGNED), dequantise(v, UNSIGNED), betas=betas)
    param = moved(param, new_m, new_v, step=step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return param, quantise(new_m, SIGNED), quantise(new_v, UNSIGNED)
