"""The torch model with logits whose bits depend on a token and what it sees, and on nothing else.

On a CPU with a compiler llorch's kernels do it (`kernels.cpu`): each sum has one order, whatever the number of rows and
of threads; another kind of processor may have another order. The rest of this text is about runs without them.

A library picks its kernel, and with it the order of a sum, by the shape of the whole batch. Two rules keep that out:

- Everything but products is made of +, -, *, / and square roots of single elements. IEEE 754 fixes the bits of each, so
  they are the same wherever an element stands, on any device; `fixed_order` has them.
- Every product has one shape: projections take `ROWS` rows (the rest zeros), attention one sequence, `QUERIES` queries
  and `KEYS` keys. Then one kernel makes all of them. In most kernels a row of the result does not depend on its place
  among the rows either, but nothing guarantees it. So each product is tried before it is used, at its own shape, dtype
  and number of threads. A product that fails is called with a single row, which has no place and no other rows.

Source: reliability of batched inference, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, matmul, nn
from torch.nn.functional import pad

from llorch.pytorch.batch_invariant import fixed_order
from llorch.pytorch.batch_invariant.fixed_order import KEYS, softmax
from llorch.pytorch.cache import Visible
from llorch.pytorch.causal_lm import CausalLM, Context, Heads, Keep, RMSNorm, rotate_and_cache, widened
from llorch.pytorch.kernels import KernelTable
from llorch.pytorch.kernels.cpu.block import cpu_kernels
from llorch.pytorch.kernels.cpu.library import library
from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.table import faster, install_kernels
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv
from llorch.pytorch.models.experts import Chosen, ExpertLinear, PerExpert, QuantisedExperts, grouped
from llorch.pytorch.models.positions import HeadNorm
from llorch.runtime.memory import keep_freed_memory

ROWS = 8  # of every product of a projection; more cost a decode step, fewer a prompt
WIDE_ROWS = 128  # of a second shape, for prompts, where it was seen to give the bits of the first
QUERIES = ROWS
ENOUGH = 64  # results of a row that a trial compares, if they show in which order they were added

Product = Callable[[Tensor], Tensor]  # of some rows with one matrix
_FOUND: dict[object, Any] = {}  # what trials of this process have shown


class FixedRows(nn.Module):
    """A projection whose rows do not depend on their company."""

    def __init__(self, kernel: Any) -> None:
        """Wrap anything with the interface of `nn.Linear`, its weight dense or packed."""
        super().__init__()
        self.kernel = kernel
        tensors = (*kernel.parameters(), *kernel.buffers())
        self._kind = (type(kernel), *((t.dtype, t.shape, t.data_ptr() % 64) for t in tensors))

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply tile by tile."""
        return in_tiles(self.kernel, x, self._kind)


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
    """Copy rows and add zeros below; the memory is new, because some kernels look at alignment too."""
    tile = rows.new_zeros(size, rows.shape[1])
    tile[: len(rows)] = rows
    return tile


@torch.no_grad()
def _agreeing_sizes(product: Product, like: Float[Tensor, "rows width"]) -> tuple[int, ...]:
    """Numbers of rows, largest first, that a product may be called with."""

    def tiled(size: int) -> Product:
        return lambda rows: torch.cat([product(_padded(tile, size)) for tile in rows.split(size)])[: len(rows)]

    generator, narrow, wide = torch.Generator().manual_seed(0), tiled(ROWS), True
    tell = 16 if like.dtype.itemsize == 2 else narrow(like[:1]).shape[1]  # results of a row that show another order
    for _ in range(max(1, ENOUGH // tell)):
        rows = _telling_rows(narrow, like, generator)
        if not _stand_alone(narrow, rows):
            return (1,)
        wide = wide and torch.equal(tiled(WIDE_ROWS)(rows), narrow(rows))
    return (WIDE_ROWS, ROWS) if wide else (ROWS,)


def _stand_alone(product: Product, rows: Float[Tensor, "tokens ..."]) -> bool:
    """Return whether rows have equal bits a place further on, and above zeros; else a third of them would differ."""
    expected = product(rows)
    kept = (torch.arange(ROWS) <= torch.arange(len(rows) // ROWS)[:, None] % (ROWS - 1)).flatten().to(rows.device)
    above = product(torch.where(kept.view(-1, *[1] * (rows.ndim - 1)), rows, 0))
    return torch.equal(product(rows.roll(1, 0)).roll(-1, 0), expected) and torch.equal(above[kept], expected[kept])


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


def attention(q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
    """softmax(q k^T / sqrt(head_dim)) v with keys in blocks, which are the same slots in every run."""
    seq, ctx = q.shape[1], keys.shape[2]
    mask = visible if visible is not None else torch.ones(seq, ctx, dtype=torch.bool, device=q.device).tril(ctx - seq)
    wide_q, keys, values = widened(q).transpose(1, 2), widened(keys), widened(values)
    n = _queries(wide_q[0], keys[0])
    scores = torch.stack([_tiled_scores(*one, n) for one in zip(wide_q, keys, strict=True)]) / math.sqrt(q.shape[-1])
    probs = keep("attn_probs", softmax(keep("attn_scores", scores.masked_fill(~mask, -math.inf))))
    context = torch.stack([_context(*pair, n) for pair in zip(probs, values, strict=True)])
    return context.transpose(1, 2).to(q.dtype)  # (batch, seq, heads, head_dim)


def _queries(q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"]) -> int:
    """Return the number of queries of a product of attention: `QUERIES` if their places do not matter, else one."""
    key = (attention, len(q), len(keys), q.shape[2], q.dtype, q.device, torch.get_num_threads())
    if key not in _FOUND:
        _FOUND[key] = QUERIES if _queries_stand_alone(q, keys) else 1
    return _FOUND[key]


@torch.no_grad()
def _queries_stand_alone(q: Float[Tensor, "heads seq width"], keys: Float[Tensor, "kv_heads ctx width"]) -> bool:
    """Check by random numbers that a query gives equal bits over a block of keys, whatever queries are beside it."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(q)

    block, n_heads, width = random(len(keys), KEYS, q.shape[2]), len(q), q.shape[2]
    return all(
        _stand_alone(
            lambda rows, one=one: one(rows.transpose(0, 1), block, QUERIES).transpose(0, 1),
            random(WIDE_ROWS, n_heads, n_in),
        )
        for one, n_in in ((_tiled_scores, width), (_context, KEYS))
    )


def _tiled_scores(
    q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"], n: int
) -> Float[Tensor, "heads seq ctx"]:
    blocks = _key_blocks(keys)
    tiles = [torch.cat([matmul(tile, block.mT) for block in blocks], dim=-1) for tile in _tiles(q, len(keys), n)]
    return _untiled(torch.stack(tiles), n)[:, : q.shape[1], : keys.shape[1]]


def _context(
    probs: Float[Tensor, "heads seq ctx"], values: Float[Tensor, "kv_heads ctx head_dim"], n: int
) -> Float[Tensor, "heads seq head_dim"]:
    """Blocks are added in their order; those that no token sees add exact zeros, so that their number is no matter."""
    blocks = _key_blocks(values)
    padded = pad(probs, (0, len(blocks) * KEYS - probs.shape[-1]))
    parts = _tiles(padded, len(values), n).unflatten(-1, (-1, KEYS)).permute(3, 0, 1, 2, 4).contiguous()  # block first
    total = torch.zeros((), dtype=values.dtype, device=values.device)
    for part, block in zip(parts, blocks, strict=True):
        total = total + torch.stack([matmul(tile, block) for tile in part])
    return _untiled(total, n)[:, : probs.shape[1]]


def _key_blocks(context: Float[Tensor, "kv_heads ctx head_dim"]) -> Float[Tensor, "blocks kv_heads keys head_dim"]:
    """Keys or values in new memory, `KEYS` slots to a block; zeros in the last one's rest."""
    padded = pad(context, (0, 0, 0, -context.shape[1] % KEYS))
    return padded.unflatten(1, (-1, KEYS)).transpose(0, 1).contiguous()


def _tiles(rows: Float[Tensor, "heads seq width"], kv_heads: int, n: int) -> Float[Tensor, "tiles kv_heads rows width"]:
    """Rows of `n` tokens, those of all heads that share keys together; zeros in the last tile's rest."""
    tiles = pad(rows, (0, 0, 0, -rows.shape[1] % n)).unflatten(1, (-1, n))  # (heads, tiles, n, width)
    return tiles.unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _untiled(tiles: Float[Tensor, "tiles kv_heads rows width"], n: int) -> Float[Tensor, "heads seq width"]:
    """Invert `_tiles`; the result includes the rest of the last tile."""
    split = tiles.unflatten(2, (-1, n))  # (tiles, kv_heads, group, n, width)
    return split.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)


class FixedExperts(nn.Module):
    """Matrices of experts, each of which is given rows that do not depend on their company."""

    reads_back = True  # which experts are chosen: see `recordable`

    def __init__(self, kernel: ExpertLinear | QuantisedExperts, kernels: KernelTable) -> None:
        """Take over the matrices of a plain one."""
        super().__init__()
        self.of = nn.ModuleList([_fixed(faster(kernel.expert(n), kernels), kernels) for n in range(kernel.n_experts)])

    def forward(self, x: PerExpert, ids: Chosen) -> PerExpert:
        """Multiply expert by expert."""
        return grouped(lambda expert, rows: self.of[expert](rows), x, ids, len(self.of))


FUNCTIONS: Mapping[str, Any] = {  # by the name that modules have for them
    "rotate": rotate_and_cache, "attend": attention, "act": fixed_order.swiglu, "softmax": softmax,
    "sigmoid": fixed_order.sigmoid, "softplus": fixed_order.softplus, "normalised": fixed_order.normalised,
    "mixed": fixed_order.mixed, "l2_norm": fixed_order.l2_norm, "rule": fixed_order.delta_rule,
}  # fmt: skip


@torch.inference_mode()
def make_reproducible(model: CausalLM, *, own: bool = True) -> None:
    """Replace modules so that no logit depends on the batch, on padding, or on how a prompt is cut into passes.

    Prefill and cached decode give the same bits too. These bits hold for one device, dtype and number of threads, and
    for any number of threads where all kernels are compiled. `own`: use llorch's CPU kernels where there are such
    kernels; an observer then sees no scores and no probabilities.
    """
    for module in model.modules():
        for name in vars(module).keys() & FUNCTIONS.keys():
            setattr(module, name, FUNCTIONS[name])
    kernels = _in_one_order(model.model.norm.weight) if own else {}
    install_kernels(model, kernels)
    for module in list(model.modules()):
        for name, kernel in module.named_children():
            setattr(module, name, _fixed(kernel, kernels))


def _fixed(kernel: nn.Module, kernels: KernelTable) -> nn.Module:
    """Wrap a module so that its rows do not depend on the batch; return one that needs no wrapper."""
    if isinstance(kernel, RMSNorm):
        return fixed_order.FixedNorm(kernel)
    if isinstance(kernel, HeadNorm):
        return fixed_order.FixedHeadNorm(kernel.eps)
    if isinstance(kernel, nn.Linear | QuantisedLinear | CpuLinear) and not is_fixed(kernel):
        return FixedRows(kernel)
    if isinstance(kernel, ExpertLinear | QuantisedExperts):
        return FixedExperts(kernel, kernels)
    if isinstance(kernel, GatedNorm):
        return fixed_order.FixedGatedNorm(kernel)
    return fixed_order.FixedConv(kernel) if isinstance(kernel, ShortConv) else kernel


def is_fixed(kernel: object) -> bool:
    """Return whether no row of a projection depends on the other rows."""
    return isinstance(kernel, FixedRows) or getattr(kernel, "fixed", False)


def _in_one_order(like: Tensor) -> KernelTable:
    """Return the CPU kernels whose sums have one order, without a compiler oneDNN's; none for other devices."""
    if like.device.type != "cpu":
        return {}
    keep_freed_memory()
    return cpu_kernels(library(), like.dtype, fixed=True)
