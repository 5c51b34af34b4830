"""The gated delta net, which stands where attention stands: Qwen3-Next and Qwen3.5.

A convolution over the last tokens, then a memory of one matrix per head that each token fades and corrects, then a norm
that is gated. Arrays between the convolution and the gated norm, and the state, are at least float32.

Padding may stand anywhere in a row: the convolution passes over it, and it writes nothing.

Source: transformers `modeling_qwen3_next.py`, Qwen3NextGatedDeltaNet; arXiv:2412.06464.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from llorch.families.config import ModelConfig
from llorch.pytorch.cache import Cache, PassPlacement, State
from llorch.pytorch.causal_lm import Hidden, Keep, rms_norm, widened
from llorch.pytorch.models.delta_rule import delta_rule

Channels = Float[Tensor, "batch seq conv_width"]
Taps = Float[Tensor, "batch taps conv_width"]
Real = Bool[Tensor, "batch seq"] | None
OfTensor = Callable[[Tensor], Tensor]


class GatedDeltaNet(nn.Module):
    """Project, convolve, write and read the state, normalise, project back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build the modules of one layer."""
        super().__init__()
        net, hidden = config.delta_net, config.hidden_size
        assert net is not None
        self.layer, self.net = layer, net
        self.in_proj_qkv: Any = nn.Linear(hidden, net.conv_width, bias=False)
        self.in_proj_z: Any = nn.Linear(hidden, net.value_width, bias=False)
        self.in_proj_b: Any = nn.Linear(hidden, net.n_value_heads, bias=False)
        self.in_proj_a: Any = nn.Linear(hidden, net.n_value_heads, bias=False)
        self.conv1d = ShortConv(net.conv_width, net.conv_kernel)
        self.dt_bias: Tensor
        self.decay: Tensor
        self.register_buffer("dt_bias", torch.zeros(net.n_value_heads))  # buffers: at least float32 in every run
        self.register_buffer("decay", torch.zeros(net.n_value_heads))  # -exp(A_log)
        self.norm: Any = GatedNorm(net.value_head_dim, config.rms_norm_eps)
        self.out_proj: Any = nn.Linear(net.value_width, hidden, bias=False)
        self.l2_norm: OfTensor = l2_norm
        self.sigmoid: OfTensor = torch.sigmoid
        self.softplus: OfTensor = softplus
        self.rule: Callable[..., tuple[Tensor, Tensor]] = delta_rule

    def forward(self, h: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the array that the delta net adds to the residual stream."""
        net, real = self.net, place.real
        before = cache.state(self.layer) or State.empty(net, len(h), h.dtype, h.device)
        qkv, z = keep("qkv_in", self.in_proj_qkv(h)), keep("z_in", self.in_proj_z(h))
        b, a = widened(keep("b_in", self.in_proj_b(h))), widened(keep("a_in", self.in_proj_a(h)))
        mixed, conv = self.conv1d(qkv, before.conv, real)
        conv, mixed = keep("conv_state", conv), keep("conv_out", mixed)
        q, k, v = mixed.split((net.key_width, net.key_width, net.value_width), dim=-1)
        q, k = (self.l2_norm(widened(x).unflatten(-1, (net.n_key_heads, -1))) for x in (q, k))
        q, k, v = keep("q_l2", q), keep("k_l2", k), widened(v).unflatten(-1, (net.n_value_heads, -1))
        beta, log_decay = keep("beta", self.sigmoid(b)), keep("log_decay", self.decay * self.softplus(a + self.dt_bias))
        if real is not None:  # padding fades nothing and writes nothing
            beta, log_decay = (x.where(real[..., None], 0) for x in (beta, log_decay))
        out, delta = self.rule(q, k, v, beta, log_decay, before.delta)
        cache.remember(self.layer, State(conv, keep("delta_state", delta)))
        normal = self.norm(keep("delta_out", out), z.unflatten(-1, (net.n_value_heads, -1)))
        return keep("linear_out", self.out_proj(keep("gated_norm", normal.flatten(-2))))


class ShortConv(nn.Module):
    """A weighted sum of each channel of a token and the few before it, then SiLU; no token sees a later one."""

    def __init__(self, width: int, kernel: int) -> None:
        """Start with the weights of nobody."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, kernel))
        self.act: OfTensor = silu

    def forward(self, x: Channels, before: Taps, real: Real) -> tuple[Channels, Taps]:
        """Compute the outputs, and the last inputs of each sequence; `before` has the last inputs of earlier passes."""
        seq, taps = x.shape[1], before.shape[1]
        if real is None:
            rows = torch.cat((before.to(x.dtype), x), dim=1)  # (batch, taps + seq, conv_width)
            return self._summed(rows, seq), rows[:, seq:]
        rank = real.cumsum(1)  # of a token among those of its sequence, from 1
        row = torch.where(real, rank + taps - 1, taps + seq)  # the last one for padding
        rows = pad(before.to(x.dtype), (0, 0, 0, seq + 1)).scatter(1, row[..., None].expand_as(x), x)
        last = rank[:, -1:] + torch.arange(taps, device=x.device)  # (batch, taps)
        return _take(self._summed(rows, seq), (rank - 1).clamp(min=0)), _take(rows, last)

    def _summed(self, rows: Float[Tensor, "batch rows conv_width"], seq: int) -> Channels:
        """Compute the convolution of `seq` tokens with the rows before them, then SiLU."""
        total = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        for tap, weight in enumerate(self.weight.unbind(1)):
            total = total + widened(rows[:, tap : tap + seq]) * weight
        return self.act(total).to(rows.dtype)


class GatedNorm(nn.Module):
    """RMSNorm of every head, times SiLU of a gate, rounded once to the dtype of the gate."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with a gain of ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows value_dim"], z: Float[Tensor, "*rows value_dim"]) -> Tensor:
        """Normalise the last axis, multiply by the gain and by silu(z)."""
        return (rms_norm(x, self.weight, eps=self.eps) * silu(widened(z))).to(z.dtype)


def l2_norm(x: Float[Tensor, "*rows key_dim"]) -> Float[Tensor, "*rows key_dim"]:
    """Divide by the length of the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def softplus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ln(1 + e^x); torch's own leaves large x as they are, which float64 sees."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _take(
    rows: Float[Tensor, "batch rows conv_width"], at: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n conv_width"]:
    """Take some rows of each sequence."""
    return rows.gather(1, at[..., None].expand(-1, -1, rows.shape[-1]))
