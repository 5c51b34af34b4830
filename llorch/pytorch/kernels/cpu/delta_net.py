"""The operations of a delta net other than its products, on the CPU, in `cpu_delta.c`.

The state goes through any number of tokens one after the other, block of columns by block, each in the nearest cache:
as fast as chunks are in torch, and passes of any length give the same bits. The reference functions are those of
`llorch.pytorch.models.delta_net` and `llorch.pytorch.models.delta_rule`.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.pytorch.kernels.cpu.layer import HALF, Compiled
from llorch.pytorch.kernels.cpu.library import pointer
from llorch.pytorch.models.delta_net import Channels, Real, Taps, l2_norm
from llorch.pytorch.models.delta_rule import Keys, Matrices, OfHeads, Values, delta_rule

MOST_TAPS, MOST_KEYS = 16, 256  # of cpu_delta.c


class CpuShortConv(nn.Module):
    """See `ShortConv`."""

    def __init__(self, weight: Tensor, library: ctypes.CDLL) -> None:
        """Take over the weights of a plain one, and a copy as the compiled function wants them."""
        super().__init__()
        self.weight, self.library = weight, library
        self.taps = weight.shape[1] - 1
        self.register_buffer("by_tap", weight.float().T.contiguous(), persistent=False)

    def forward(self, x: Channels, before: Taps, real: Real) -> tuple[Channels, Taps]:
        """Compute the outputs, and the last inputs of each sequence."""
        x, before, real = x.contiguous(), before.to(x.dtype).contiguous(), None if real is None else real.contiguous()
        y, after = torch.empty_like(x), torch.empty_like(before)
        pointers = map(pointer, (x, before, real, self._buffers["by_tap"], y, after))
        self.library.llorch_short_conv(HALF[x.dtype], *pointers, *x.shape, self.taps)
        return y, after


class CpuGatedNorm(nn.Module):
    """See `GatedNorm`."""

    def __init__(self, weight: Tensor, eps: float, library: ctypes.CDLL) -> None:
        """Take over the gain of a plain norm, in the dtype of the run."""
        super().__init__()
        self.weight, self.eps, self.library = weight, eps, library

    def forward(self, x: Float[Tensor, "*rows value_dim"], z: Float[Tensor, "*rows value_dim"]) -> Tensor:
        """Normalise the last axis."""
        x, z = x.contiguous(), z.contiguous()
        y, width = torch.empty_like(z), x.shape[-1]
        pointers = x.data_ptr(), z.data_ptr(), self.weight.data_ptr(), self.eps, y.data_ptr()
        self.library.llorch_gated_norm(HALF[z.dtype], *pointers, x.numel() // width, width)
        return y


class CpuL2Norm(Compiled):
    """See `l2_norm`."""

    def __call__(self, x: Keys) -> Keys:
        """Divide by the length of the last axis."""
        if x.dtype is not torch.float32:
            return l2_norm(x)
        x, (batch, seq, heads, dim) = in_rows(x), x.shape
        y = torch.empty(x.shape)
        self.library.llorch_l2_norm(x.data_ptr(), y.data_ptr(), batch * seq, x.stride(1), heads, dim)
        return y


class CpuDeltaRule(Compiled):
    """See `delta_rule`; the state is written where it was."""

    def __call__(
        self, q: Keys, k: Keys, v: Values, beta: OfHeads, log_decay: OfHeads, state: Matrices
    ) -> tuple[Values, Matrices]:
        """Compute the value that each token reads, and the state after the last token."""
        (batch, seq, k_heads, key_dim), (v_heads, value_dim) = q.shape, v.shape[2:]
        if q.dtype is not torch.float32 or key_dim > MOST_KEYS:
            return delta_rule(q, k, v, beta, log_decay, state)
        v, state = in_rows(v), state.contiguous()
        held = [x.contiguous() for x in (q, k, beta, log_decay)]
        out = torch.empty(v.shape)
        pointers = map(pointer, (*held[:2], v, *held[2:], state, out))
        sizes = batch, seq, k_heads, v_heads, key_dim, value_dim, v.stride(1)
        self.library.llorch_delta_rule(*pointers, *sizes)
        return out, state


def in_rows(x: Float[Tensor, "batch seq heads width"]) -> Float[Tensor, "batch seq heads width"]:
    """Return numbers with the heads of a token side by side and tokens at one distance; if they lie so, no copy."""
    width = x.shape[3]
    fits = x.stride(3) == 1 and x.stride(2) == width and x.stride(0) == x.shape[1] * x.stride(1)
    return x if fits else x.contiguous()
