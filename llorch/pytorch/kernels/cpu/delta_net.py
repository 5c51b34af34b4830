"""Operations of a delta net (linear attention with a state), except products with weights, in `delta.c`.

The state processes any number of tokens one by one, in blocks of columns that stay in the L1 cache. This is as fast as
chunks are in torch, and passes of any length give the same bits. The reference functions are in
`llorch.pytorch.models.delta_net` and `llorch.pytorch.models.delta_rule`.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llorch.pytorch.kernels.cpu.layer import HALF, Compiled, CpuNorm, pointer
from llorch.pytorch.models.delta_net import Channels, RealTokens, Taps, l2_norm
from llorch.pytorch.models.delta_rule import Keys, Matrices, PerHead, Values, delta_rule

MOST_TAPS, MOST_KEYS = 16, 256  # limits of delta.c


class CpuShortConv(nn.Module):
    """Kernel of `ShortConv`."""

    def __init__(self, weight: Tensor, library: ctypes.CDLL) -> None:
        """Take over the weights of a `ShortConv`, and make a copy in the layout of the compiled function."""
        super().__init__()
        self.weight, self.library = weight, library
        self.taps = weight.shape[1] - 1
        self.register_buffer("by_tap", weight.float().T.contiguous(), persistent=False)

    def forward(self, x: Channels, state: Taps, real: RealTokens) -> tuple[Channels, Taps]:
        """Compute the outputs and the new state, which has the last `taps` inputs of each sequence."""
        x, state, real = x.contiguous(), state.to(x.dtype).contiguous(), None if real is None else real.contiguous()
        y, new_state = torch.empty_like(x), torch.empty_like(state)
        pointers = map(pointer, (x, state, real, self._buffers["by_tap"], y, new_state))
        self.library.llorch_short_conv(HALF[x.dtype], *pointers, *x.shape, self.taps)
        return y, new_state


class CpuGatedNorm(CpuNorm):
    """Kernel of `GatedNorm`."""

    def forward(self, x: Float[Tensor, "*rows value_dim"], z: Float[Tensor, "*rows value_dim"]) -> Tensor:
        """Normalise the last axis."""
        x, z = x.contiguous(), z.contiguous()
        y, width = torch.empty_like(z), x.shape[-1]
        pointers = x.data_ptr(), z.data_ptr(), self.weight.data_ptr(), self.eps, y.data_ptr()
        self.library.llorch_gated_norm(HALF[z.dtype], *pointers, x.numel() // width, width)
        return y


class CpuL2Norm(Compiled):
    """Kernel of `l2_norm`."""

    def __call__(self, x: Keys) -> Keys:
        """Divide by the L2 norm of the last axis."""
        if x.dtype is not torch.float32:
            return l2_norm(x)
        x, (batch, seq, heads, dim) = with_adjacent_heads(x), x.shape
        y = torch.empty(x.shape)
        self.library.llorch_l2_norm(x.data_ptr(), y.data_ptr(), batch * seq, x.stride(1), heads, dim)
        return y


class CpuDeltaRule(Compiled):
    """Kernel of `delta_rule` that updates the state in place."""

    def __call__(
        self, q: Keys, k: Keys, v: Values, beta: PerHead, log_decay: PerHead, state: Matrices
    ) -> tuple[Values, Matrices]:
        """Compute the output of each token, and the state after the last token."""
        (batch, seq, k_heads, key_dim), (v_heads, value_dim) = q.shape, v.shape[2:]
        if q.dtype is not torch.float32 or key_dim > MOST_KEYS:
            return delta_rule(q, k, v, beta, log_decay, state)
        v, state = with_adjacent_heads(v), state.contiguous()
        inputs = [x.contiguous() for x in (q, k, beta, log_decay)]
        out = torch.empty(v.shape)
        pointers = map(pointer, (*inputs[:2], v, *inputs[2:], state, out))
        sizes = batch, seq, k_heads, v_heads, key_dim, value_dim, v.stride(1)
        self.library.llorch_delta_rule(*pointers, *sizes)
        return out, state


def with_adjacent_heads(x: Float[Tensor, "batch seq heads width"]) -> Float[Tensor, "batch seq heads width"]:
    """Return x with the heads of a token adjacent and a constant token stride, copied only if needed."""
    width = x.shape[3]
    is_laid_out = x.stride(3) == 1 and x.stride(2) == width and x.stride(0) == x.shape[1] * x.stride(1)
    return x if is_laid_out else x.contiguous()
