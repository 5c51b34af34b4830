"""Sums, norms and functions whose bits depend on their numbers only, not on the batch or the device.

They replace functions of the model in mode "reproducible", see `batch_invariant.reproducible`.

Sums are trees of additions, exp is a polynomial; everything else is +, -, *, / and square roots of single elements.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from llorch.pytorch.causal_lm import Heads, Hidden, RMSNorm, widened
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv
from llorch.pytorch.models.delta_rule import Keys, Matrices, PerHead, Values
from llorch.pytorch.models.experts import PerExpert
from llorch.pytorch.models.positions import HeadNorm

CACHED = 1 << 15  # elements of which all intermediate results fit the cache of a CPU core
KEYS = 64  # keys per block of attention, and per partial sum of softmax
LN2_HIGH, LN2_LOW = 355 / 512, -2.121944400546905827678785e-4  # their sum is ln 2; k * LN2_HIGH is exact


class FixedNorm(nn.Module):
    """RMSNorm with a fixed order of sums."""

    def __init__(self, norm: RMSNorm | GatedNorm) -> None:
        """Take over the gain and epsilon of an RMSNorm."""
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        x_wide = widened(x)
        mean_square = tree_sum(x_wide * x_wide) / x.shape[-1]
        return (x_wide / torch.sqrt(mean_square + self.eps)[..., None] * self.weight).to(x.dtype)


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute gate / (1 + exp(-gate)) * up, rounded once."""
    return (silu(widened(gate)) * widened(up)).to(gate.dtype)


class FixedHeadNorm(HeadNorm):
    """Head norm without a gain, with a fixed order of sums."""

    def forward(self, x: Heads) -> Heads:
        """Normalise every head to unit root mean square."""
        x_wide = widened(x)
        return (x_wide / torch.sqrt(tree_sum(x_wide * x_wide) / x.shape[-1] + self.eps)[..., None]).to(x.dtype)


class FixedGatedNorm(nn.Module):
    """Gated norm with a fixed order of sums."""

    def __init__(self, norm: GatedNorm) -> None:
        """Take over the gain and epsilon of a gated norm."""
        super().__init__()
        self.norm = FixedNorm(norm)

    def forward(self, x: Float[Tensor, "*rows width"], z: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis of x, which is at least float32, and multiply by SiLU of the gate."""
        return (self.norm(x) * silu(widened(z))).to(z.dtype)


class FixedConv(ShortConv):
    """Short convolution with `exp` of this module; sums over its taps have a fixed order in any case."""

    def __init__(self, conv: ShortConv) -> None:
        """Take over the weights of a convolution."""
        nn.Module.__init__(self)
        self.weight, self.act = conv.weight, silu


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute x / (1 + exp(-x))."""
    return x / (exp(-x) + 1)


def sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute 1 / (1 + exp(-x))."""
    return 1 / (exp(-x) + 1)


def softplus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ln(1 + e^x) = max(x, 0) + 2 artanh(y / (2 + y)) with y = e^-|x|, by the series of artanh."""
    y = exp(-x.abs())
    z = y / (2 + y)  # at most a third
    square, terms = z * z, 9 if x.dtype is torch.float32 else 18  # enough for the precision of the dtype
    series = torch.full_like(z, 1 / (2 * terms - 1))
    for n in reversed(range(terms - 1)):
        series = series.mul_(square).add_(1 / (2 * n + 1))
    return x.clamp(min=0) + 2 * z * series


def l2_norm(x: Float[Tensor, "*rows key_dim"]) -> Float[Tensor, "*rows key_dim"]:
    """Divide by the L2 norm of the last axis."""
    return x / torch.sqrt(tree_sum(x * x) + 1e-6)[..., None]


def normalised(weights: Float[Tensor, "*rows topk"]) -> Float[Tensor, "*rows topk"]:
    """Divide by the sum along the last axis."""
    return weights / tree_sum(weights)[..., None]


def mixed(outputs: PerExpert, weights: Float[Tensor, "batch seq topk"]) -> Hidden:
    """Compute the weighted sum of a token's expert outputs, with additions in a tree."""
    return tree_sum((widened(outputs) * widened(weights)[..., None]).mT)


def delta_rule(
    q: Keys, k: Keys, v: Values, beta: PerHead, log_decay: PerHead, state: Matrices
) -> tuple[Values, Matrices]:
    """Compute the delta rule token by token, without matrix products of a library."""
    group, decay, outputs = v.shape[2] // k.shape[2], exp(log_decay)[..., None, None], []
    q, k = (x.repeat_interleave(group, dim=2)[..., None] for x in (q, k))  # (batch, seq, v_heads, key_dim, 1)
    for t in range(q.shape[1]):
        state = decay[:, t] * state
        delta = beta[:, t, :, None] * (v[:, t] - tree_sum((k[:, t] * state).mT))
        state = state + k[:, t] * delta[:, :, None]
        outputs.append(tree_sum((q[:, t] * state).mT) / math.sqrt(q.shape[-2]))
    return torch.stack(outputs, dim=1), state


def softmax(scores: Float[Tensor, "*rows ctx"]) -> Float[Tensor, "*rows ctx"]:
    """Normalise the last axis to probabilities; at least one element of each row must be finite.

    On the CPU the rows are computed in parts that stay in its cache.
    """
    n_rows = max(1, CACHED // scores.shape[-1]) if scores.device.type == "cpu" else scores.numel()
    parts = scores.flatten(0, -2).split(n_rows)
    return torch.cat([_softmax(rows) for rows in parts]).view(scores.shape)


def _softmax(scores: Float[Tensor, "rows ctx"]) -> Float[Tensor, "rows ctx"]:
    powers = exp(scores - scores.amax(-1, keepdim=True))
    blocks = pad(powers, (0, -scores.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS))
    total = torch.zeros((), dtype=scores.dtype, device=scores.device)
    for block in tree_sum(blocks).unbind(-1):
        total = total + block
    return powers / total[..., None]


def tree_sum(x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
    """Add the halves of the last axis until one element remains."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        odd = x[..., 2 * half :]  # one element or none
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], odd), dim=-1)
    return x[..., 0]


def exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute e^x by operations on single elements; 0 below the smallest normal number, never infinite.

    With x = k * ln 2 + r and |r| <= ln 2 / 2 it is 2^k times the series of e^r.
    """
    is_float32 = x.dtype is torch.float32
    smallest, largest, terms = (-87.0, 88.0, 8) if is_float32 else (-708.0, 709.0, 14)
    clamped = x.clamp(smallest, largest)
    k = torch.round(clamped * (1 / math.log(2)))
    r = (clamped - k * LN2_HIGH) - k * LN2_LOW
    series = torch.full_like(r, 1 / math.factorial(terms - 1))
    for n in reversed(range(terms - 1)):
        series = series.mul_(r).add_(1 / math.factorial(n))
    power = ((k.int() + 127) << 23).view(x.dtype) if is_float32 else ((k.long() + 1023) << 52).view(x.dtype)
    return torch.where(x < smallest, 0, series * power)
