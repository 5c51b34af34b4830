"""Sums, norms and functions whose bits depend on nothing but the numbers, see `batch_invariant.reproducible`.

Sums are trees of additions, exp is a polynomial; all else is +, -, *, / and square roots of single elements.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from llorch.pytorch.causal_lm import Heads, Hidden, RMSNorm, widened
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv
from llorch.pytorch.models.delta_rule import Keys, Matrices, OfHeads, Values
from llorch.pytorch.models.experts import PerExpert
from llorch.pytorch.models.positions import HeadNorm

KEYS = 64  # of a block of attention, and of its sums
LN2_HIGH, LN2_LOW = 355 / 512, -2.121944400546905827678785e-4  # their sum is ln 2; products of the first are exact


class FixedNorm(nn.Module):
    """RMSNorm with a sum of one order."""

    def __init__(self, norm: RMSNorm | GatedNorm) -> None:
        """Take over the gain and epsilon of an RMSNorm."""
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        wide = widened(x)
        mean_square = tree_sum(wide * wide) / x.shape[-1]
        return (wide / torch.sqrt(mean_square + self.eps)[..., None] * self.weight).to(x.dtype)


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute gate / (1 + exp(-gate)) * up, rounded once."""
    return (silu(widened(gate)) * widened(up)).to(gate.dtype)


class FixedHeadNorm(HeadNorm):
    """The norm of heads, which has no gain, with a sum of one order."""

    def forward(self, x: Heads) -> Heads:
        """Bring every head to unit root mean square."""
        wide = widened(x)
        return (wide / torch.sqrt(tree_sum(wide * wide) / x.shape[-1] + self.eps)[..., None]).to(x.dtype)


class FixedGatedNorm(nn.Module):
    """The gated norm with a sum of one order."""

    def __init__(self, plain: GatedNorm) -> None:
        """Take over the gain and epsilon of a plain one."""
        super().__init__()
        self.norm = FixedNorm(plain)

    def forward(self, x: Float[Tensor, "*rows width"], z: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis of what is at least float32, times SiLU of the gate."""
        return (self.norm(x) * silu(widened(z))).to(z.dtype)


class FixedConv(ShortConv):
    """The convolution with an exponential of its own; its sums have one order anyway."""

    def __init__(self, plain: ShortConv) -> None:
        """Take over the weights of a plain one."""
        nn.Module.__init__(self)
        self.weight, self.act = plain.weight, silu


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
    square, terms = z * z, 9 if x.dtype is torch.float32 else 18
    series = torch.full_like(z, 1 / (2 * terms - 1))
    for n in reversed(range(terms - 1)):
        series = series.mul_(square).add_(1 / (2 * n + 1))
    return x.clamp(min=0) + 2 * z * series


def l2_norm(x: Float[Tensor, "*rows key_dim"]) -> Float[Tensor, "*rows key_dim"]:
    """Divide by the length of the last axis."""
    return x / torch.sqrt(tree_sum(x * x) + 1e-6)[..., None]


def normalised(weights: Float[Tensor, "*rows topk"]) -> Float[Tensor, "*rows topk"]:
    """Divide by the sum along the last axis."""
    return weights / tree_sum(weights)[..., None]


def mixed(made: PerExpert, weights: Float[Tensor, "batch seq topk"]) -> Hidden:
    """Compute the weighted sum over the experts of a token, with the additions in a tree."""
    return tree_sum((widened(made) * widened(weights)[..., None]).mT)


def delta_rule(
    q: Keys, k: Keys, v: Values, beta: OfHeads, log_decay: OfHeads, state: Matrices
) -> tuple[Values, Matrices]:
    """Run the delta rule token by token, without a product of a library."""
    group, decay, made = v.shape[2] // k.shape[2], exp(log_decay)[..., None, None], []
    q, k = (x.repeat_interleave(group, dim=2)[..., None] for x in (q, k))  # (batch, seq, v_heads, key_dim, 1)
    for t in range(q.shape[1]):
        state = decay[:, t] * state
        delta = beta[:, t, :, None] * (v[:, t] - tree_sum((k[:, t] * state).mT))
        state = state + k[:, t] * delta[:, :, None]
        made.append(tree_sum((q[:, t] * state).mT) / math.sqrt(q.shape[-2]))
    return torch.stack(made, dim=1), state


def softmax(scores: Float[Tensor, "*rows ctx"]) -> Float[Tensor, "*rows ctx"]:
    """Along the last axis; at least one element of each row must be finite."""
    powers = exp(scores - scores.amax(-1, keepdim=True))
    blocks = pad(powers, (0, -scores.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS))
    total = torch.zeros((), dtype=scores.dtype, device=scores.device)
    for block in tree_sum(blocks).unbind(-1):
        total = total + block
    return powers / total[..., None]


def tree_sum(x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
    """Add the halves of the last axis until one element is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        odd = x[..., 2 * half :]  # one element or none
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], odd), dim=-1)
    return x[..., 0]


def exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Take e to the power of each element by single operations; 0 below the smallest normal number, never infinite.

    With x = k * ln 2 + r and |r| <= ln 2 / 2 it is 2^k times the series of e^r.
    """
    single = x.dtype is torch.float32
    smallest, largest, terms = (-87.0, 88.0, 8) if single else (-708.0, 709.0, 14)
    inside = x.clamp(smallest, largest)
    k = torch.round(inside * (1 / math.log(2)))
    r = (inside - k * LN2_HIGH) - k * LN2_LOW
    series = torch.full_like(r, 1 / math.factorial(terms - 1))
    for n in reversed(range(terms - 1)):
        series = series.mul_(r).add_(1 / math.factorial(n))
    power = ((k.int() + 127) << 23).view(x.dtype) if single else ((k.long() + 1023) << 52).view(x.dtype)
    return torch.where(x < smallest, 0, series * power)
