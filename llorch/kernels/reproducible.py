"""The parts of the torch model with results whose bits depend on a token and what it sees, and on nothing else.

A library picks its kernel, and with it the order of a sum, by the shape of the whole batch. Two rules keep that out:

- What is no product is made of +, -, *, / and square roots of single elements. IEEE 754 fixes the bits of each, so
  they are the same wherever an element stands, on any device. Sums are trees of additions, exp is a polynomial.
- Every product has one shape: projections take `ROWS` rows (the rest zeros), attention one sequence, `QUERIES` queries
  and `KEYS` keys. Then one kernel makes all of them, and a row of its result depends on that row alone.

Source: reliability of batched inference, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from llorch.torch_cache import Visible
from llorch.torch_model import Context, Heads, Keep, widened

ROWS = 8  # of every product of a projection; measured: 4 to 128 are stable, more cost a decode step, fewer a prompt
WIDE_ROWS = 128  # of a second shape, for prompts, where it was seen to give the bits of the first
QUERIES = 8
KEYS = 64
LN2_HIGH, LN2_LOW = 355 / 512, -2.121944400546905827678785e-4  # their sum is ln 2; products of the first are exact


class FixedRows(nn.Module):
    """A projection that is only ever called with one number of rows, or with one of two that agree bit by bit."""

    def __init__(self, leaf: Any, wide: bool) -> None:
        """Wrap a leaf.

        Args:
            leaf: Anything with the interface of `nn.Linear`, its weight dense or packed.
            wide: Whether products of `WIDE_ROWS` have the bits of those of `ROWS`; see `wide_rows_agree`.
        """
        super().__init__()
        self.leaf = leaf
        self.sizes = (WIDE_ROWS, ROWS) if wide else (ROWS,)

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply tile by tile."""
        flat, done, made = x.reshape(-1, x.shape[-1]), 0, []
        for size in self.sizes:
            while len(flat) - done >= size or (size == ROWS and done < len(flat)):
                made.append(self.leaf(_padded(flat[done : done + size], size)))
                done += size
        return torch.cat(made)[: len(flat)].unflatten(0, x.shape[:-1])


def _padded(rows: Float[Tensor, "rows width"], size: int) -> Float[Tensor, "size width"]:
    """A copy with zeros below: new memory, because some kernels look at alignment too."""
    tile = rows.new_zeros(size, rows.shape[1])
    tile[: len(rows)] = rows
    return tile


def wide_rows_agree(leaf: Any, probe: Float[Tensor, "rows in"]) -> bool:
    """Find out whether products of `WIDE_ROWS` rows have the bits of products of `ROWS`.

    A kernel that adds in another order changes about a third of all results, so that equality of all of them is no
    accident. Holds for the number of threads at the time.

    Args:
        leaf: A projection.
        probe: `WIDE_ROWS` random rows.

    Returns:
        Whether every bit agrees.
    """
    narrow = torch.cat([leaf(_padded(tile, ROWS)) for tile in probe.split(ROWS)])
    return torch.equal(leaf(_padded(probe, WIDE_ROWS)), narrow)


class FixedNorm(nn.Module):
    """RMSNorm with a sum of one order."""

    def __init__(self, norm: Any) -> None:
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
    wide = widened(gate)
    return (wide / (exp(-wide) + 1) * widened(up)).to(gate.dtype)


def attention(q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
    """softmax(q k^T / sqrt(head_dim)) v with keys in blocks, which are the same slots in every run."""
    seq, ctx = q.shape[1], keys.shape[2]
    mask = visible if visible is not None else torch.ones(seq, ctx, dtype=torch.bool, device=q.device).tril(ctx - seq)
    wide_q, keys, values = widened(q).transpose(1, 2), widened(keys), widened(values)
    scores = torch.stack([_scores(*one) for one in zip(wide_q, keys, strict=True)]) / math.sqrt(q.shape[-1])
    probs = keep("attn_probs", softmax(keep("attn_scores", scores.masked_fill(~mask, -math.inf))))
    context = torch.stack([_context(*one) for one in zip(probs, values, strict=True)])  # (batch, heads, seq, head_dim)
    return context.transpose(1, 2).to(q.dtype)


def _scores(
    q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"]
) -> Float[Tensor, "heads seq ctx"]:
    blocks = _blocks(keys)
    tiles = [torch.cat([tile @ block.mT for block in blocks], dim=-1) for tile in _tiles(q, len(keys))]
    return _untiled(torch.stack(tiles))[:, : q.shape[1], : keys.shape[1]]


def _context(
    probs: Float[Tensor, "heads seq ctx"], values: Float[Tensor, "kv_heads ctx head_dim"]
) -> Float[Tensor, "heads seq head_dim"]:
    """Blocks are added in their order; those that no token sees add exact zeros, so that their number is no matter."""
    blocks = _blocks(values)
    padded = pad(probs, (0, len(blocks) * KEYS - probs.shape[-1]))
    parts = _tiles(padded, len(values)).unflatten(-1, (-1, KEYS)).permute(3, 0, 1, 2, 4).contiguous()  # block first
    total = torch.zeros((), dtype=values.dtype, device=values.device)
    for part, block in zip(parts, blocks, strict=True):
        total = total + torch.stack([tile @ block for tile in part])
    return _untiled(total)[:, : probs.shape[1]]


def _blocks(context: Float[Tensor, "kv_heads ctx head_dim"]) -> Float[Tensor, "blocks kv_heads keys head_dim"]:
    """Keys or values in new memory, `KEYS` slots to a block; zeros in the last one's rest."""
    padded = pad(context, (0, 0, 0, -context.shape[1] % KEYS))
    return padded.unflatten(1, (-1, KEYS)).transpose(0, 1).contiguous()


def _tiles(rows: Float[Tensor, "heads seq width"], kv_heads: int) -> Float[Tensor, "tiles kv_heads rows width"]:
    """Rows of `QUERIES` tokens, those of all heads that share keys together; zeros in the last tile's rest."""
    tiles = pad(rows, (0, 0, 0, -rows.shape[1] % QUERIES)).unflatten(1, (-1, QUERIES))  # (heads, tiles, QUERIES, width)
    return tiles.unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _untiled(tiles: Float[Tensor, "tiles kv_heads rows width"]) -> Float[Tensor, "heads seq width"]:
    """The inverse, the last tile's rest included."""
    split = tiles.unflatten(2, (-1, QUERIES))  # (tiles, kv_heads, group, QUERIES, width)
    return split.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)


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
