"""Reading the fields of packed matrices inside Triton kernels; what they hold is told in `llorch.pytorch.packing`.

`row` and `run` (32 elements of a row) are tensors that broadcast to the shape of the result; `there` masks it.
Functions under `triton.jit` are compiled, not called: `no_type_check` keeps out the checks that tests hook into others.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from llorch.pytorch.packing import Fields

RUN = 32


def pointers(fields: Fields) -> list[Tensor]:
    """What every kernel is given, in this order: codes, upper, scales, d, dmin.

    Codes of four bits are handed over as 32-bit words and their upper bits as 16-bit ones; a field that the type lacks
    is any other one, and is never read.
    """
    codes = fields["codes"]
    words = codes.view(torch.int32) if codes.dtype is torch.uint8 else codes
    upper = fields["upper"].view(torch.int16) if "upper" in fields else words
    d = fields["d"]
    return [words, upper, fields.get("scales", words), d, fields.get("dmin", d)]


@triton.jit
@no_type_check
def load_half(d, row, block, n_blocks, there):
    """A float16 of each block, as float32."""
    return tl.load(d + row * n_blocks + block, mask=there, other=0).to(tl.float32)


@triton.jit
@no_type_check
def load_twelve_bits(scales, d, dmin, row, run, n_runs, there):
    """Scale and minimum of each run of Q4_K, as float32: two neighbouring bytes hold the twelve bits."""
    at = scales + row * (n_runs // 2 * 3) + run // 2 * 3 + run % 2
    low = tl.load(at, mask=there, other=0).to(tl.int32)
    high = tl.load(at + 1, mask=there, other=0).to(tl.int32)
    both = (low | high << 8) >> run % 2 * 4
    scale = (both & 63).to(tl.float32) * load_half(d, row, run // 8, n_runs // 8, there)
    minimum = (both >> 6 & 63).to(tl.float32) * load_half(dmin, row, run // 8, n_runs // 8, there)
    return scale, minimum


@triton.jit
@no_type_check
def load_eight_bits(scales, d, row, run, n_runs, there, HALF: tl.constexpr):
    """Scale of the first or second half of each run of Q6_K, as float32."""
    scale = tl.load(scales + row * (n_runs * 2) + run * 2 + HALF, mask=there, other=0).to(tl.float32)
    return scale * load_half(d, row, run // 8, n_runs // 8, there)
