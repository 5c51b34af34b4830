"""SwiGLU in one launch; the twin is `llorch.pytorch.causal_lm.swiglu`.

y = gate / (1 + exp(-gate)) * up        in float32, rounded once
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_TILE = 1024  # 16 bytes of bfloat16 for each of 128 threads


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute silu(gate) * up for inference: nothing is recorded for a backward pass."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    _swiglu[(triton.cdiv(gate.numel(), _TILE),)](gate, up, y, gate.numel(), TILE=_TILE)
    return y


@triton.jit
@no_type_check
def _swiglu(gate, up, y, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    g = tl.load(gate + at, mask=there, other=0).to(tl.float32)
    u = tl.load(up + at, mask=there, other=0).to(tl.float32)
    power = tl.exp(-tl.abs(g))  # never overflows
    silu = tl.where(g < 0, g * power, g) / (1 + power)
    tl.store(y + at, (silu * u).to(y.dtype.element_ty), mask=there)
