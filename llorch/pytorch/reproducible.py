"""The torch model with logits whose bits depend on a token and what it sees, and on nothing else.

A library picks its kernel, and with it the order of a sum, by the shape of the whole batch. Two rules keep that out:

- What is no product is made of +, -, *, / and square roots of single elements. IEEE 754 fixes the bits of each, so
  they are the same wherever an element stands, on any device. Sums are trees of additions, exp is a polynomial.
- Every product has one shape: projections take `ROWS` rows (the rest zeros), attention one sequence, `QUERIES` queries
  and `KEYS` keys. Then one kernel makes all of them. That a row of its result does not depend on its place among the
  rows either is no law but a habit of most kernels, so each product is tried before it is used, at its own shape, dtype
  and number of threads. One that fails is called with a single row, which has no place and no company.

Source: reliability of batched inference, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, matmul, nn
from torch.nn.functional import pad

from llorch.pytorch.cache import Visible
from llorch.pytorch.causal_lm import CausalLM, Context, Heads, Keep, rotate_and_cache, widened
from llorch.pytorch.cpu.block import cpu_leaves
from llorch.pytorch.cpu.library import library
from llorch.pytorch.leaves import Leaves, faster

ROWS = 8  # of every product of a projection; more cost a decode step, fewer a prompt
WIDE_ROWS = 128  # of a second shape, for prompts, where it was seen to give the bits of the first
QUERIES = ROWS
KEYS = 64
ENOUGH = 64  # results of a row that a trial compares, if they show in which order they were added
LN2_HIGH, LN2_LOW = 355 / 512, -2.121944400546905827678785e-4  # their sum is ln 2; products of the first are exact

Product = Callable[[Tensor], Tensor]  # of some rows with one matrix
_FOUND: dict[object, Any] = {}  # what trials of this process have shown


class FixedRows(nn.Module):
    """A projection whose rows do not depend on their company."""

    def __init__(self, leaf: Any) -> None:
        """Wrap anything with the interface of `nn.Linear`, its weight dense or packed."""
        super().__init__()
        self.leaf = leaf
        tensors = (*leaf.parameters(), *leaf.buffers())
        self._kind = (type(leaf), *((t.dtype, t.shape, t.data_ptr() % 64) for t in tensors))

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply tile by tile."""
        return in_tiles(self.leaf, x, self._kind)


def in_tiles(product: Product, x: Float[Tensor, "*rows in"], kind: object) -> Float[Tensor, "*rows out"]:
    """Multiply rows by one matrix so that the bits of each result depend on its row alone.

    `product` is called with one number of rows only, or with some that agree bit by bit. `kind` is what decides, beside
    the rows, which kernel runs; products of one kind are tried once.
    """
    flat = x.reshape(-1, x.shape[-1])
    key = (kind, flat.shape[1], x.dtype, x.device, torch.get_num_threads())
    if key not in _FOUND:
        _FOUND[key] = _agreeing_sizes(product, flat)
    sizes, done, made = _FOUND[key], 0, []
    for size in sizes:
        while len(flat) - done >= size or (size == sizes[-1] and done < len(flat)):
            made.append(product(_padded(flat[done : done + size], size)))
            done += size
    return torch.cat(made)[: len(flat)].unflatten(0, x.shape[:-1])


def _padded(rows: Float[Tensor, "rows width"], size: int) -> Float[Tensor, "size width"]:
    """A copy with zeros below: new memory, because some kernels look at alignment too."""
    tile = rows.new_zeros(size, rows.shape[1])
    tile[: len(rows)] = rows
    return tile


@torch.no_grad()
def _agreeing_sizes(product: Product, like: Float[Tensor, "rows width"]) -> tuple[int, ...]:
    """Numbers of rows, largest first, that a product may be called with."""

    def tiled(size: int) -> Product:
        return lambda rows: torch.cat([product(_padded(tile, size)) for tile in rows.split(size)])[: len(rows)]

    generator, narrow, wide = torch.Generator().manual_seed(0), tiled(ROWS), True
    tell = (
        16 if like.dtype.itemsize == 2 else narrow(like[:1]).shape[1]
    )  # results of a row that would show another order
    for _ in range(max(1, ENOUGH // tell)):
        rows = _telling_rows(narrow, like, generator)
        if not _stand_alone(narrow, rows):
            return (1,)
        wide = wide and torch.equal(tiled(WIDE_ROWS)(rows), narrow(rows))
    return (WIDE_ROWS, ROWS) if wide else (ROWS,)


def _stand_alone(product: Product, rows: Float[Tensor, "tokens ..."]) -> bool:
    """Whether rows have the same bits a place further on, and above zeros.

    A kernel that adds in another order changes about a third of all results, so that many that agree are no accident.
    """
    want = product(rows)
    kept = (torch.arange(ROWS) <= torch.arange(len(rows) // ROWS)[:, None] % (ROWS - 1)).flatten().to(rows.device)
    above = product(torch.where(kept.view(-1, *[1] * (rows.ndim - 1)), rows, 0))
    return torch.equal(product(rows.roll(1, 0)).roll(-1, 0), want) and torch.equal(above[kept], want[kept])


def _telling_rows(
    product: Product, like: Float[Tensor, "rows width"], generator: torch.Generator
) -> Float[Tensor, "wide_rows width"]:
    """`WIDE_ROWS` rows whose products show in which order they were added.

    Rounded to 16 bits, one sum in 50,000 does. So one sum of each row is made to cancel: many pairs s w_j, -s w_i, of
    different sizes s, leave the rounding errors of its order alone. Powers of two keep them, and w, clear of a bias.
    """
    width, large = like.shape[1], 30 if like.dtype is torch.bfloat16 else 10
    if like.dtype.itemsize > 2:
        return torch.randn(WIDE_ROWS, width, generator=generator).to(like)
    columns = torch.randperm(width, generator=generator)[: min(width, WIDE_ROWS) // 2 * 2]
    units = torch.zeros(len(columns), width)
    units[torch.arange(len(columns)), columns] = 2.0**large
    weight = product(units.to(like)).float().cpu() / 2.0**large  # (columns, out)
    pairs = weight[:, torch.randint(weight.shape[1], (WIDE_ROWS,), generator=generator)].T.unflatten(1, (-1, 2))
    sizes = torch.randint(12, pairs.shape[:2], generator=generator) - 11 + large
    rows = torch.zeros(WIDE_ROWS, width)
    rows[:, columns] = (pairs.flip(-1) * torch.tensor([1.0, -1.0]) * 2.0 ** sizes[..., None]).flatten(1)
    return rows.to(like)


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
    n = _queries(wide_q[0], keys[0])
    scores = torch.stack([_scores(*one, n) for one in zip(wide_q, keys, strict=True)]) / math.sqrt(q.shape[-1])
    probs = keep("attn_probs", softmax(keep("attn_scores", scores.masked_fill(~mask, -math.inf))))
    context = torch.stack(
        [_context(*one, n) for one in zip(probs, values, strict=True)]
    )  # (batch, heads, seq, head_dim)
    return context.transpose(1, 2).to(q.dtype)


def _queries(q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"]) -> int:
    """How many queries a product of attention may have: `QUERIES` if their places do not matter, else one."""
    key = (attention, len(q), len(keys), q.shape[2], q.dtype, q.device, torch.get_num_threads())
    if key not in _FOUND:
        _FOUND[key] = QUERIES if _queries_stand_alone(q, keys) else 1
    return _FOUND[key]


@torch.no_grad()
def _queries_stand_alone(q: Float[Tensor, "heads seq width"], keys: Float[Tensor, "kv_heads ctx width"]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(q)

    block, n_heads, width = random(len(keys), KEYS, q.shape[2]), len(q), q.shape[2]
    return all(
        _stand_alone(
            lambda rows, one=one: one(rows.transpose(0, 1), block, QUERIES).transpose(0, 1),
            random(WIDE_ROWS, n_heads, n_in),
        )
        for one, n_in in ((_scores, width), (_context, KEYS))
    )


def _scores(
    q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"], n: int
) -> Float[Tensor, "heads seq ctx"]:
    blocks = _blocks(keys)
    tiles = [torch.cat([matmul(tile, block.mT) for block in blocks], dim=-1) for tile in _tiles(q, len(keys), n)]
    return _untiled(torch.stack(tiles), n)[:, : q.shape[1], : keys.shape[1]]


def _context(
    probs: Float[Tensor, "heads seq ctx"], values: Float[Tensor, "kv_heads ctx head_dim"], n: int
) -> Float[Tensor, "heads seq head_dim"]:
    """Blocks are added in their order; those that no token sees add exact zeros, so that their number is no matter."""
    blocks = _blocks(values)
    padded = pad(probs, (0, len(blocks) * KEYS - probs.shape[-1]))
    parts = _tiles(padded, len(values), n).unflatten(-1, (-1, KEYS)).permute(3, 0, 1, 2, 4).contiguous()  # block first
    total = torch.zeros((), dtype=values.dtype, device=values.device)
    for part, block in zip(parts, blocks, strict=True):
        total = total + torch.stack([matmul(tile, block) for tile in part])
    return _untiled(total, n)[:, : probs.shape[1]]


def _blocks(context: Float[Tensor, "kv_heads ctx head_dim"]) -> Float[Tensor, "blocks kv_heads keys head_dim"]:
    """Keys or values in new memory, `KEYS` slots to a block; zeros in the last one's rest."""
    padded = pad(context, (0, 0, 0, -context.shape[1] % KEYS))
    return padded.unflatten(1, (-1, KEYS)).transpose(0, 1).contiguous()


def _tiles(rows: Float[Tensor, "heads seq width"], kv_heads: int, n: int) -> Float[Tensor, "tiles kv_heads rows width"]:
    """Rows of `n` tokens, those of all heads that share keys together; zeros in the last tile's rest."""
    tiles = pad(rows, (0, 0, 0, -rows.shape[1] % n)).unflatten(1, (-1, n))  # (heads, tiles, n, width)
    return tiles.unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _untiled(tiles: Float[Tensor, "tiles kv_heads rows width"], n: int) -> Float[Tensor, "heads seq width"]:
    """The inverse, the last tile's rest included."""
    split = tiles.unflatten(2, (-1, n))  # (tiles, kv_heads, group, n, width)
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


NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.inference_mode()
def make_reproducible(model: CausalLM, *, own: bool = True) -> None:
    """Replace leaves so that no logit depends on the batch, on padding, or on how a prompt is cut into passes.

    Prefill and cached decode give the same bits too. That holds for one device, dtype and number of threads. Rotations
    and the cache stay as they are: each element of theirs is made by itself. `own`: the CPU's leaves make products.
    """
    leaves = _in_one_order(model.model.norm.weight) if own else {}
    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        for name in NORMS:
            setattr(layer, name, FixedNorm(getattr(layer, name)))
        attend, mlp = layer.self_attn, layer.mlp
        _fix(attend, ("q_proj", "k_proj", "v_proj", "o_proj"), leaves)
        if attend.q_norm is not None:
            attend.q_norm, attend.k_norm = FixedNorm(attend.q_norm), FixedNorm(attend.k_norm)
        attend.rotate, attend.attend = rotate_and_cache, attention
        _fix(mlp, ("gate_proj", "up_proj", "down_proj"), leaves)
        mlp.act = swiglu
    model.model.norm = FixedNorm(model.model.norm)
    _fix(model, ("lm_head",), leaves)


def _fix(owner: nn.Module, names: tuple[str, ...], leaves: Leaves) -> None:
    for name in names:
        setattr(owner, name, FixedRows(faster(getattr(owner, name), leaves)))


def _in_one_order(like: Tensor) -> Leaves:
    """The CPU's, dense products all by oneDNN, whose sums have one order for few and many rows."""
    if like.device.type != "cpu":
        return {}
    return {**cpu_leaves(library(), like.dtype), **cpu_leaves(None, like.dtype)}
