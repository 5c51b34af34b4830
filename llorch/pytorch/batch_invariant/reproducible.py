"""Batch-invariant torch model: the bits of a token's logits depend only on this token and its context.

On a CPU with a compiler, llorch's kernels are batch-invariant (`kernels.cpu`): each sum has one order, for any number
of rows and threads; another kind of processor may have another order. The rest of this text is about runs without them.

A library selects its kernel, and so the order of a sum, by the shape of the whole batch. Two rules of this module, for
mode "reproducible", prevent this:

- Everything except products consists of +, -, *, / and square roots of single elements. IEEE 754 defines the bits of
  each, so they do not depend on the position of an element or on the device; see `fixed_order`.
- Every product has one shape: projections have `ROWS` rows (padded with zeros), attention one sequence, `QUERIES`
  queries and `KEYS` keys. So one kernel computes all of them. In most kernels a row of the result does not depend on
  its position among the rows either, but nothing guarantees this. So each product is tested before its first use, at
  its shape, dtype and number of threads. A product that fails is called with a single row.

Source: reliability of batched inference, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, matmul, nn
from torch.nn.functional import pad

from llorch.ops.compiled.library import library
from llorch.pytorch.batch_invariant import fixed_order
from llorch.pytorch.batch_invariant.fixed_order import KEYS, softmax
from llorch.pytorch.cache import Visible
from llorch.pytorch.causal_lm import CausalLM, Context, Heads, Keep, RMSNorm, rotate_and_cache, widened
from llorch.pytorch.kernels import KernelTable
from llorch.pytorch.kernels.cpu.block import cpu_kernels
from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.table import faster, install_kernels
from llorch.pytorch.models.delta_net import GatedNorm, ShortConv
from llorch.pytorch.models.experts import ExpertIds, ExpertLinear, PerExpert, QuantisedExperts, grouped
from llorch.pytorch.models.positions import HeadNorm
from llorch.runtime.memory import keep_freed_memory

ROWS = 8  # rows per product of a projection; more slow down decode steps, fewer slow down prefill
WIDE_ROWS = 128  # second shape for prefill, used if tests show the same bits
QUERIES = ROWS
ENOUGH = 64  # outputs per row that a test compares, of those that reveal the order of addition

Product = Callable[[Tensor], Tensor]  # product of some rows and one matrix
_FOUND: dict[object, Any] = {}  # results of the tests in this process, by product


class FixedRows(nn.Module):
    """Projection whose output rows do not depend on other rows of the input."""

    def __init__(self, kernel: Any) -> None:
        """Wrap any module with the interface of `nn.Linear`, with a dense or packed weight."""
        super().__init__()
        self.kernel = kernel
        tensors = (*kernel.parameters(), *kernel.buffers())
        self._kind = (type(kernel), *((tensor.dtype, tensor.shape, tensor.data_ptr() % 64) for tensor in tensors))

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in tiles of rows."""
        return in_tiles(self.kernel, x, self._kind)


def in_tiles(product: Product, x: Float[Tensor, "*rows in"], kind: object) -> Float[Tensor, "*rows out"]:
    """Multiply rows by one matrix so that the bits of each output depend on its row only.

    `product` is called with one number of rows, or with two that agree bit by bit. `kind` has everything else that
    the library's choice of a kernel may depend on; products of one kind are tested once.
    """
    flat_rows = x.reshape(-1, x.shape[-1])
    key = (kind, flat_rows.shape[1], x.dtype, x.device, torch.get_num_threads())
    if key not in _FOUND:
        _FOUND[key] = _find_sizes(product, flat_rows)
    sizes, n_done, outputs = _FOUND[key], 0, []
    for size in sizes:
        while len(flat_rows) - n_done >= size or (size == sizes[-1] and n_done < len(flat_rows)):
            outputs.append(product(_pad_rows(flat_rows[n_done : n_done + size], size)))
            n_done += size
    return torch.cat(outputs)[: len(flat_rows)].unflatten(0, x.shape[:-1])


def _pad_rows(rows: Float[Tensor, "rows width"], size: int) -> Float[Tensor, "size width"]:
    """Copy rows and append zeros; the memory is new, because some kernels depend on alignment, too."""
    tile = rows.new_zeros(size, rows.shape[1])
    tile[: len(rows)] = rows
    return tile


@torch.no_grad()
def _find_sizes(product: Product, like: Float[Tensor, "rows width"]) -> tuple[int, ...]:
    """Return the numbers of rows, largest first, with which a product may be called: its rows pass the tests."""

    def tiled(size: int) -> Product:
        return lambda rows: torch.cat([product(_pad_rows(tile, size)) for tile in rows.split(size)])[: len(rows)]

    generator, small_product, is_wide_equal = torch.Generator().manual_seed(0), tiled(ROWS), True
    # outputs per row that reveal another order: in 16 bits few do, although `_sensitive_rows` makes sums cancel
    n_outputs = 16 if like.dtype.itemsize == 2 else small_product(like[:1]).shape[1]
    for _ in range(max(1, ENOUGH // n_outputs)):
        rows = _sensitive_rows(small_product, like, generator)
        if not _rows_are_independent(small_product, rows):
            return (1,)
        is_wide_equal = is_wide_equal and torch.equal(tiled(WIDE_ROWS)(rows), small_product(rows))
    return (WIDE_ROWS, ROWS) if is_wide_equal else (ROWS,)


def _rows_are_independent(product: Product, rows: Float[Tensor, "tokens ..."]) -> bool:
    """Tell if rows keep their bits at the next position, and if rows after them are zeros, up to `ROWS` - 1 of them."""
    expected = product(rows)
    is_row = (torch.arange(ROWS) <= torch.arange(len(rows) // ROWS)[:, None] % (ROWS - 1)).flatten().to(rows.device)
    padded = product(torch.where(is_row.view(-1, *[1] * (rows.ndim - 1)), rows, 0))
    return torch.equal(product(rows.roll(1, 0)).roll(-1, 0), expected) and torch.equal(padded[is_row], expected[is_row])


def _sensitive_rows(
    product: Product, like: Float[Tensor, "rows width"], generator: torch.Generator
) -> Float[Tensor, "wide_rows width"]:
    """Return `WIDE_ROWS` rows whose products reveal the order of addition.

    Rounded to 16 bits, one sum in 50,000 reveals it. So one sum of each row is made to cancel: many pairs s w_j, -s w_i
    of different sizes s leave only the rounding errors of its order. Sizes are powers of two, large against a bias.
    """
    width, exponent = like.shape[1], 30 if like.dtype is torch.bfloat16 else 10
    if like.dtype.itemsize > 2:
        return torch.randn(WIDE_ROWS, width, generator=generator).to(like)
    columns = torch.randperm(width, generator=generator)[: min(width, WIDE_ROWS) // 2 * 2]
    units = torch.zeros(len(columns), width)
    units[torch.arange(len(columns)), columns] = 2.0**exponent
    weight = product(units.to(like)).float().cpu() / 2.0**exponent  # (columns, out)
    pairs = weight[:, torch.randint(weight.shape[1], (WIDE_ROWS,), generator=generator)].T.unflatten(1, (-1, 2))
    sizes = torch.randint(12, pairs.shape[:2], generator=generator) - 11 + exponent
    rows = torch.zeros(WIDE_ROWS, width)
    rows[:, columns] = (pairs.flip(-1) * torch.tensor([1.0, -1.0]) * 2.0 ** sizes[..., None]).flatten(1)
    return rows.to(like)


def attention(q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
    """Compute softmax(q k^T / sqrt(head_dim)) v with keys in blocks of the same slots in every run."""
    seq, ctx = q.shape[1], keys.shape[2]
    mask = visible if visible is not None else torch.ones(seq, ctx, dtype=torch.bool, device=q.device).tril(ctx - seq)
    wide_q, keys, values = widened(q).transpose(1, 2), widened(keys), widened(values)
    n = _n_queries(wide_q[0], keys[0])
    scores = torch.stack([_tiled_scores(*pair, n) for pair in zip(wide_q, keys, strict=True)])
    scores = scores.div_(math.sqrt(q.shape[-1])).masked_fill_(~mask, -math.inf)
    probs = keep("attn_probs", softmax(keep("attn_scores", scores)))
    context = torch.stack([_context(*pair, n) for pair in zip(probs, values, strict=True)])
    return context.transpose(1, 2).to(q.dtype)  # (batch, seq, heads, head_dim)


def _n_queries(q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"]) -> int:
    """Return the number of queries per product of attention: `QUERIES` if their positions do not matter, else one."""
    key = (attention, len(q), len(keys), q.shape[2], q.dtype, q.device, torch.get_num_threads())
    if key not in _FOUND:
        _FOUND[key] = QUERIES if _queries_are_independent(q, keys) else 1
    return _FOUND[key]


@torch.no_grad()
def _queries_are_independent(q: Float[Tensor, "heads seq width"], keys: Float[Tensor, "kv_heads ctx width"]) -> bool:
    """Test with random numbers if both products of attention give a query equal bits whatever the other queries are."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(q)

    block, n_heads, width = random(len(keys), KEYS, q.shape[2]), len(q), q.shape[2]
    return all(
        _rows_are_independent(
            lambda rows, multiply=multiply: multiply(rows.transpose(0, 1), block, QUERIES).transpose(0, 1),
            random(WIDE_ROWS, n_heads, n_in),
        )
        for multiply, n_in in ((_tiled_scores, width), (_context, KEYS))
    )


def _tiled_scores(
    q: Float[Tensor, "heads seq head_dim"], keys: Float[Tensor, "kv_heads ctx head_dim"], n: int
) -> Float[Tensor, "heads seq ctx"]:
    """Compute q k^T in products of one shape: `n` queries and `KEYS` keys."""
    blocks = _key_blocks(keys)
    tiles = [torch.cat([matmul(tile, block.mT) for block in blocks], dim=-1) for tile in _tiles(q, len(keys), n)]
    return _untiled(torch.stack(tiles), n)[:, : q.shape[1], : keys.shape[1]]


def _context(
    probs: Float[Tensor, "heads seq ctx"], values: Float[Tensor, "kv_heads ctx head_dim"], n: int
) -> Float[Tensor, "heads seq head_dim"]:
    """Multiply probabilities and values block by block; blocks that no token sees add exact zeros, in any number."""
    blocks = _key_blocks(values)
    padded = pad(probs, (0, len(blocks) * KEYS - probs.shape[-1]))
    parts = _tiles(padded, len(values), n).unflatten(-1, (-1, KEYS)).permute(3, 0, 1, 2, 4).contiguous()  # block first
    total = torch.zeros((), dtype=values.dtype, device=values.device)
    for part, block in zip(parts, blocks, strict=True):
        total = total + torch.stack([matmul(tile, block) for tile in part])
    return _untiled(total, n)[:, : probs.shape[1]]


def _key_blocks(context: Float[Tensor, "kv_heads ctx head_dim"]) -> Float[Tensor, "blocks kv_heads keys head_dim"]:
    """Copy keys or values to new memory in blocks of `KEYS` slots, padded with zeros."""
    padded = pad(context, (0, 0, 0, -context.shape[1] % KEYS))
    return padded.unflatten(1, (-1, KEYS)).transpose(0, 1).contiguous()


def _tiles(rows: Float[Tensor, "heads seq width"], kv_heads: int, n: int) -> Float[Tensor, "tiles kv_heads rows width"]:
    """Group rows of `n` tokens, for all heads that share keys together, padded with zeros."""
    tiles = pad(rows, (0, 0, 0, -rows.shape[1] % n)).unflatten(1, (-1, n))  # (heads, tiles, n, width)
    return tiles.unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _untiled(tiles: Float[Tensor, "tiles kv_heads rows width"], n: int) -> Float[Tensor, "heads seq width"]:
    """Invert `_tiles`; the result includes the padding."""
    split = tiles.unflatten(2, (-1, n))  # (tiles, kv_heads, group, n, width)
    return split.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)


class FixedExperts(nn.Module):
    """Matrices of experts whose rows do not depend on other rows."""

    reads_back = True  # reads expert ids on the host, see `recordable`

    def __init__(self, kernel: ExpertLinear | QuantisedExperts, kernels: KernelTable) -> None:
        """Take over the matrices of experts."""
        super().__init__()
        self.by_expert = nn.ModuleList(
            [_fixed(faster(kernel.expert(n), kernels), kernels) for n in range(kernel.n_experts)]
        )

    def forward(self, x: PerExpert, ids: ExpertIds) -> PerExpert:
        """Multiply expert by expert."""
        return grouped(lambda expert, rows: self.by_expert[expert](rows), x, ids, len(self.by_expert))


FUNCTIONS: Mapping[str, Any] = {  # by attribute name in the modules
    "rotate": rotate_and_cache, "attend": attention, "act": fixed_order.swiglu, "softmax": softmax,
    "sigmoid": fixed_order.sigmoid, "softplus": fixed_order.softplus, "normalised": fixed_order.normalised,
    "mixed": fixed_order.mixed, "l2_norm": fixed_order.l2_norm, "rule": fixed_order.delta_rule,
}  # fmt: skip


@torch.inference_mode()
def make_reproducible(model: CausalLM, *, own: bool = True) -> None:
    """Replace modules so that no logit depends on the batch, on padding, or on the chunks of a prefill.

    Prefill and cached decode give the same bits, too. The bits hold for one device, dtype and number of threads, or for
    any number of threads if all kernels are compiled. `own`: use llorch's CPU kernels if available; an observer then
    sees no scores and no probabilities.
    """
    for module in model.modules():
        for name in vars(module).keys() & FUNCTIONS.keys():
            setattr(module, name, FUNCTIONS[name])
    kernels = _fixed_order_kernels(model.model.norm.weight) if own else {}
    install_kernels(model, kernels)
    for module in list(model.modules()):
        for name, kernel in module.named_children():
            setattr(module, name, _fixed(kernel, kernels))


def _fixed(kernel: nn.Module, kernels: KernelTable) -> nn.Module:
    """Wrap a module so that its rows do not depend on the batch; return it unchanged if it needs no wrapper."""
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
    """Tell if no row of a projection depends on the other rows."""
    return isinstance(kernel, FixedRows) or getattr(kernel, "fixed", False)


def _fixed_order_kernels(like: Tensor) -> KernelTable:
    """Return the CPU kernels with a fixed order of sums; without a compiler oneDNN's, to be wrapped by `FixedRows`."""
    if like.device.type != "cpu":
        return {}
    keep_freed_memory()
    return cpu_kernels(library(), like.dtype, fixed=True)
