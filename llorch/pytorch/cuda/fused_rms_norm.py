"""RMSNorm in one launch; the twin is `llorch.pytorch.causal_lm.rms_norm`.

    y = x / sqrt(mean(x * x) + eps) * weight        mean over the last axis, all in float32, rounded once

A program takes a tile of whole rows: one row of a hidden state, several of the short rows of a head.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from llorch.pytorch.causal_lm import RMSNorm

_TILE = 2048  # elements of a program, where a row is no longer


class FusedRMSNorm(nn.Module):
    """RMSNorm for inference: nothing is recorded for a backward pass."""

    def __init__(self, norm: RMSNorm) -> None:
        """Share the gain of a plain one, in float32, bfloat16 or float16."""
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        x = x.contiguous()
        y, width = torch.empty_like(x), x.shape[-1]
        n_rows, columns = x.numel() // width, triton.next_power_of_2(width)
        tile_rows = max(1, _TILE // columns)
        launch: Any = _normalise[(triton.cdiv(n_rows, tile_rows),)]
        launch(
            x, self.weight, y, n_rows, width, self.eps,
            ROWS=tile_rows, COLUMNS=columns, num_warps=4 if columns <= _TILE else 8,
        )  # fmt: skip
        return y


@triton.jit
@no_type_check
def _normalise(x, weight, y, n_rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    there = (row < n_rows)[:, None] & (column < width)[None, :]
    wide = tl.load(x + at, mask=there, other=0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    mean_square = tl.sum(wide * wide, 1) / width
    normal = wide * (1 / tl.sqrt_rn(mean_square + eps))[:, None] * gain[None, :]
    tl.store(y + at, normal.to(y.dtype.element_ty), mask=there)
