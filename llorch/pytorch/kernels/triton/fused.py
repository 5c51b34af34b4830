"""Operations of a layer, except its products: each in one launch, computed in float32 and rounded once.

The reference functions are in `llorch.pytorch.causal_lm`. A program of the norm computes a tile of whole rows: one row
of a hidden state, several short rows of heads. A program of the rotation computes one token with all heads of its
queries, its keys or its values. Padding writes to its slot like any token; the order of these writes does not matter,
because no token sees that slot.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Context, Heads, Keep, RMSNorm, keep_nothing
from llorch.pytorch.causal_lm import rotate_and_cache as plain_rotate_and_cache

_NORM_TILE = 2048  # elements per program, unless a row has more


class FusedRMSNorm(nn.Module):
    """RMSNorm for inference: it does not support backward."""

    def __init__(self, norm: RMSNorm) -> None:
        """Share the gain of an `RMSNorm` in float32, bfloat16 or float16."""
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        return normalised(x, self.weight, self.eps)


def normalised(x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], eps: float) -> Tensor:
    """Compute `rms_norm` of `causal_lm`."""
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    n_rows, tile = x.numel() // width, norm_tile(width)
    launch: Any = _normalise[(triton.cdiv(n_rows, tile["ROWS"]),)]
    launch(x, weight, y, n_rows, width, eps, **tile)
    return y


def norm_tile(width: int) -> dict[str, Any]:
    """Choose the number of whole rows per program, and its warps."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _NORM_TILE // columns), "COLUMNS": columns, "num_warps": 4 if columns <= _NORM_TILE else 8}


@triton.jit
@no_type_check
def _normalise(x, weight, y, n_rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Apply RMSNorm to `ROWS` rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offsets = row[:, None] * width + column[None, :]
    mask = (row < n_rows)[:, None] & (column < width)[None, :]
    x_float32 = tl.load(x + offsets, mask=mask, other=0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    mean_square = tl.sum(x_float32 * x_float32, 1) / width
    output = x_float32 * (1 / tl.sqrt_rn(mean_square + eps))[:, None] * gain[None, :]
    tl.store(y + offsets, output.to(y.dtype.element_ty), mask=mask)


def rotate_and_cache(
    q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
) -> tuple[Heads, Context, Context]:
    """Compute `rotate_and_cache` of `causal_lm`; an observer gets a copy of the rotated keys."""
    if 2 * place.cos.shape[-1] != q.shape[-1]:  # only a part of each head is rotated
        return plain_rotate_and_cache(q, k, v, layer, place, cache, keep)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    is_observed = keep is not keep_nothing
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k) if is_observed else k
    _launch_rotation(q, k, v, place, cache.keys[layer], cache.values[layer], q_rope, k_rope, keep_keys=is_observed)
    q_rope = keep("q_rope", q_rope)
    if is_observed and (new_keys := keep("k_rope", k_rope)) is not k_rope:  # the observer replaced the keys
        cache.append(layer, new_keys, v, place)
    keys, values = cache.context(layer, place)
    return q_rope, keep("k_cache", keys), keep("v_cache", values)


def _launch_rotation(
    q: Heads, k: Heads, v: Heads, place: PassPlacement, keys: Context, values: Context,
    q_rope: Heads, k_rope: Heads, *, keep_keys: bool,
) -> None:  # fmt: skip
    """Rotate queries and keys, and write keys and values to the cache; `keep_keys` also fills `k_rope`."""
    batch, seq, n_heads, head_dim = q.shape
    rows, kv_heads = keys.shape[:2]
    n_slots = keys.stride(1) // head_dim
    n_tokens = batch * seq // rows  # all tokens if a paged cache has one row for all sequences
    _rotate[(batch * seq, 3)](
        q, k, v, place.slots, place.cos, place.sin, q_rope, k_rope, keys, values, n_tokens, n_heads, kv_heads, n_slots,
        KEEP_KEYS=keep_keys, HALF=head_dim // 2, COLUMNS=triton.next_power_of_2(head_dim // 2),
        HEADS=triton.next_power_of_2(n_heads), KV_HEADS=triton.next_power_of_2(kv_heads),
    )  # fmt: skip


@triton.jit
@no_type_check
def _rotate(
    q, k, v, slots, cos, sin, q_rope, k_rope, keys, values, seq, n_heads, kv_heads, n_slots,
    KEEP_KEYS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries (part 0), rotate its keys and write them to the cache (1), or write its values (2)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0)[None, :]
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0)[None, :]
    if part == 0:  # Triton requires one shape of a name in all branches, so these are separate names
        head = tl.arange(0, HEADS)
        offsets, mask = first_halves(token * n_heads + head, head < n_heads, column, HALF)
        rotate_pairs(q + offsets, q_rope + offsets, mask, c, s, HALF)
    else:
        kv_head = tl.arange(0, KV_HEADS)
        kv_offsets, kv_mask = first_halves(token * kv_heads + kv_head, kv_head < kv_heads, column, HALF)
        row = (token // seq * kv_heads + kv_head) * n_slots + tl.load(slots + token)
        cache_offsets = row[:, None] * (2 * HALF) + column[None, :]
        if part == 1:
            rotate_pairs(k + kv_offsets, keys + cache_offsets, kv_mask, c, s, HALF)
            if KEEP_KEYS:
                rotate_pairs(k + kv_offsets, k_rope + kv_offsets, kv_mask, c, s, HALF)
        else:
            tl.store(values + cache_offsets, tl.load(v + kv_offsets, mask=kv_mask), mask=kv_mask)
            tl.store(values + cache_offsets + HALF, tl.load(v + kv_offsets + HALF, mask=kv_mask), mask=kv_mask)


@triton.jit
@no_type_check
def first_halves(head, head_mask, column, HALF: tl.constexpr):
    """Compute the offsets of the first halves of some heads, (heads, half), and their mask."""
    return head[:, None] * (2 * HALF) + column[None, :], head_mask[:, None] & (column < HALF)[None, :]


@triton.jit
@no_type_check
def rotate_pairs(source, target, mask, c, s, HALF: tl.constexpr):
    """Rotate the pairs (j, j + half) of some heads."""
    first = tl.load(source, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0).to(tl.float32)
    tl.store(target, (first * c - second * s).to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * c + first * s).to(target.dtype.element_ty), mask=mask)


ACT_TILE = 1024  # 16 bytes of bfloat16 for each of 128 threads


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute silu(gate) * up for inference: it does not support backward."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    _swiglu[(triton.cdiv(gate.numel(), ACT_TILE),)](gate, up, y, gate.numel(), TILE=ACT_TILE)
    return y


@triton.jit
@no_type_check
def _swiglu(gate, up, y, n, TILE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < n
    g = tl.load(gate + offsets, mask=mask, other=0).to(tl.float32)
    u = tl.load(up + offsets, mask=mask, other=0).to(tl.float32)
    power = tl.exp(-tl.abs(g))  # never overflows
    silu = tl.where(g < 0, g * power, g) / (1 + power)
    tl.store(y + offsets, (silu * u).to(y.dtype.element_ty), mask=mask)
