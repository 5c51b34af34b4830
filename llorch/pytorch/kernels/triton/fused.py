"""The operations of a layer other than its products: each in one launch, computed in float32 and rounded once.

The reference functions are those of `llorch.pytorch.causal_lm`. A program of the norm takes a tile of whole rows: one
of a hidden state, several of the short ones of a head. One of the rotation takes one token and all heads of its
queries, of its keys or of its values; padding writes to its slot like any token, and which of several wins does not
matter, as nobody sees it.
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

_NORM_TILE = 2048  # elements of a program, where a row is no longer


class FusedRMSNorm(nn.Module):
    """RMSNorm for inference: nothing is recorded for a backward pass."""

    def __init__(self, norm: RMSNorm) -> None:
        """Share the gain of a plain one, in float32, bfloat16 or float16."""
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
    """Choose the whole rows that a program takes, and its warps."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _NORM_TILE // columns), "COLUMNS": columns, "num_warps": 4 if columns <= _NORM_TILE else 8}


@triton.jit
@no_type_check
def _normalise(x, weight, y, n_rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Apply RMSNorm to `ROWS` rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    there = (row < n_rows)[:, None] & (column < width)[None, :]
    wide = tl.load(x + at, mask=there, other=0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    mean_square = tl.sum(wide * wide, 1) / width
    normal = wide * (1 / tl.sqrt_rn(mean_square + eps))[:, None] * gain[None, :]
    tl.store(y + at, normal.to(y.dtype.element_ty), mask=there)


def rotate_and_cache(
    q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
) -> tuple[Heads, Context, Context]:
    """Compute `rotate_and_cache` of `causal_lm`; rotated keys are a copy where observed."""
    if 2 * place.cos.shape[-1] != q.shape[-1]:  # only a part of a head is turned
        return plain_rotate_and_cache(q, k, v, layer, place, cache, keep)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    observed = keep is not keep_nothing
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k) if observed else k
    _launch(q, k, v, place, cache.keys[layer], cache.values[layer], q_rope, k_rope, keep_keys=observed)
    q_rope = keep("q_rope", q_rope)
    if observed and (used := keep("k_rope", k_rope)) is not k_rope:  # others are to be used from here on
        cache.append(layer, used, v, place)
    keys, values = cache.context(layer, place)
    return q_rope, keep("k_cache", keys), keep("v_cache", values)


def _launch(
    q: Heads, k: Heads, v: Heads, place: PassPlacement, keys: Context, values: Context,
    q_rope: Heads, k_rope: Heads, *, keep_keys: bool,
) -> None:  # fmt: skip
    """Turn queries and keys, and write keys and values to the cache; `keep_keys` also fills `k_rope`."""
    batch, seq, n_heads, head_dim = q.shape
    rows, kv_heads = keys.shape[:2]
    n_slots = keys.stride(1) // head_dim
    of_a_row = batch * seq // rows  # all of them, where the store has one row for all sequences
    _rotate[(batch * seq, 3)](
        q, k, v, place.slots, place.cos, place.sin, q_rope, k_rope, keys, values, of_a_row, n_heads, kv_heads, n_slots,
        KEEP_KEYS=keep_keys, HALF=head_dim // 2, COLUMNS=triton.next_power_of_2(head_dim // 2),
        HEADS=triton.next_power_of_2(n_heads), KV_HEADS=triton.next_power_of_2(kv_heads),
    )  # fmt: skip


@triton.jit
@no_type_check
def _rotate(
    q, k, v, slots, cos, sin, q_rope, k_rope, keys, values, seq, n_heads, kv_heads, n_slots,
    KEEP_KEYS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Turn the queries of one token, or turn its keys and write them to the cache, or write its values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0)[None, :]
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0)[None, :]
    if part == 0:  # a name has one shape in all branches
        head = tl.arange(0, HEADS)
        at, there = first_halves(token * n_heads + head, head < n_heads, column, HALF)
        turn(q + at, q_rope + at, there, c, s, HALF)
    else:
        kv_head = tl.arange(0, KV_HEADS)
        new, new_there = first_halves(token * kv_heads + kv_head, kv_head < kv_heads, column, HALF)
        row = (token // seq * kv_heads + kv_head) * n_slots + tl.load(slots + token)
        cached = row[:, None] * (2 * HALF) + column[None, :]
        if part == 1:
            turn(k + new, keys + cached, new_there, c, s, HALF)
            if KEEP_KEYS:
                turn(k + new, k_rope + new, new_there, c, s, HALF)
        else:
            tl.store(values + cached, tl.load(v + new, mask=new_there), mask=new_there)
            tl.store(values + cached + HALF, tl.load(v + new + HALF, mask=new_there), mask=new_there)


@triton.jit
@no_type_check
def first_halves(head, head_there, column, HALF: tl.constexpr):
    """Compute the offsets of the first halves of some heads, (heads, half), and the mask of those that are there."""
    return head[:, None] * (2 * HALF) + column[None, :], head_there[:, None] & (column < HALF)[None, :]


@triton.jit
@no_type_check
def turn(source, target, there, c, s, HALF: tl.constexpr):
    """Turn the pairs (j, j + half) of some heads."""
    first = tl.load(source, mask=there, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0).to(tl.float32)
    tl.store(target, (first * c - second * s).to(target.dtype.element_ty), mask=there)
    tl.store(target + HALF, (second * c + first * s).to(target.dtype.element_ty), mask=there)


ACT_TILE = 1024  # 16 bytes of bfloat16 for each of 128 threads


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute silu(gate) * up for inference: nothing is recorded for a backward pass."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    _swiglu[(triton.cdiv(gate.numel(), ACT_TILE),)](gate, up, y, gate.numel(), TILE=ACT_TILE)
    return y


@triton.jit
@no_type_check
def _swiglu(gate, up, y, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    g = tl.load(gate + at, mask=there, other=0).to(tl.float32)
    u = tl.load(up + at, mask=there, other=0).to(tl.float32)
    power = tl.exp(-tl.abs(g))  # never overflows
    silu = tl.where(g < 0, g * power, g) / (1 + power)
    tl.store(y + at, (silu * u).to(y.dtype.element_ty), mask=there)
