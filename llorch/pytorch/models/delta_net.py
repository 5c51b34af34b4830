"""Gated delta net, which replaces attention in layers of Qwen3-Next and Qwen3.5.

A convolution over the last tokens, then a state of one matrix per head that each token decays and corrects, then a
gated norm. Arrays between the convolution and the gated norm, and the state, are at least float32.

Padding may be anywhere in a row: the convolution skips it, and it does not change the state.

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
Taps = Float[Tensor, "batch taps conv_width"]  # last inputs of the convolution
RealTokens = Bool[Tensor, "batch seq"] | None
TensorFunction = Callable[[Tensor], Tensor]


class GatedDeltaNet(nn.Module):
    """Gated delta net: project, convolve, write and read the state, normalise, project back."""

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
        self.l2_norm: TensorFunction = l2_norm
        self.sigmoid: TensorFunction = torch.sigmoid
        self.softplus: TensorFunction = softplus
        self.rule: Callable[..., tuple[Tensor, Tensor]] = delta_rule

    def forward(self, h: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the array that the delta net adds to the residual stream."""
        net, real = self.net, place.real
        state = cache.state(self.layer) or State.empty(net, len(h), h.dtype, h.device)
        qkv, z = keep("qkv_in", self.in_proj_qkv(h)), keep("z_in", self.in_proj_z(h))
        b, a = widened(keep("b_in", self.in_proj_b(h))), widened(keep("a_in", self.in_proj_a(h)))
        mixed, conv = self.conv1d(qkv, state.conv, real)
        conv, mixed = keep("conv_state", conv), keep("conv_out", mixed)
        q, k, v = mixed.split((net.key_width, net.key_width, net.value_width), dim=-1)
        q, k = (self.l2_norm(widened(x).unflatten(-1, (net.n_key_heads, -1))) for x in (q, k))
        q, k, v = keep("q_l2", q), keep("k_l2", k), widened(v).unflatten(-1, (net.n_value_heads, -1))
        beta, log_decay = keep("beta", self.sigmoid(b)), keep("log_decay", self.decay * self.softplus(a + self.dt_bias))
        if real is not None:  # padding must neither decay nor write the state
            beta, log_decay = (x.where(real[..., None], 0) for x in (beta, log_decay))
        out, delta = self.rule(q, k, v, beta, log_decay, state.delta)
        cache.remember(self.layer, State(conv, keep("delta_state", delta)))
        normalised = self.norm(keep("delta_out", out), z.unflatten(-1, (net.n_value_heads, -1)))
        return keep("linear_out", self.out_proj(keep("gated_norm", normalised.flatten(-2))))


class ShortConv(nn.Module):
    """Causal depthwise convolution of a token and the few tokens before it, then SiLU."""

    def __init__(self, width: int, kernel: int) -> None:
        """Create weights without values."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, kernel))
        self.act: TensorFunction = silu

    def forward(self, x: Channels, state: Taps, real: RealTokens) -> tuple[Channels, Taps]:
        """Compute the outputs and the new state; a state has the last inputs of each sequence."""
        seq, taps = x.shape[1], state.shape[1]
        if real is None:
            rows = torch.cat((state.to(x.dtype), x), dim=1)  # (batch, taps + seq, conv_width)
            return self._convolve(rows, seq), rows[:, seq:]
        token_rank = real.cumsum(1)  # index of a token among the real tokens of its sequence, from 1
        target_row = torch.where(real, token_rank + taps - 1, taps + seq)  # padding goes to the last row
        rows = pad(state.to(x.dtype), (0, 0, 0, seq + 1)).scatter(1, target_row[..., None].expand_as(x), x)
        last_rows = token_rank[:, -1:] + torch.arange(taps, device=x.device)  # (batch, taps)
        return _gather_rows(self._convolve(rows, seq), (token_rank - 1).clamp(min=0)), _gather_rows(rows, last_rows)

    def _convolve(self, rows: Float[Tensor, "batch rows conv_width"], seq: int) -> Channels:
        """Convolve `seq` tokens with their preceding rows, then apply SiLU."""
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
    """Divide by the L2 norm of the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def softplus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ln(1 + e^x); torch's softplus returns x for large x, an error that float64 shows."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _gather_rows(
    rows: Float[Tensor, "batch rows conv_width"], row_index: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n conv_width"]:
    """Gather some rows of each sequence."""
    return rows.gather(1, row_index[..., None].expand(-1, -1, rows.shape[-1]))
