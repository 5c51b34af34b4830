"""Rotation of queries and keys and the writing of the cache in one launch; the twin is `rotate_and_cache` of the page.

A program takes one token and all heads of its queries, of its keys or of its values. Rotation is float32, rounded once.
Padding writes to its slot like any token; which of several wins does not matter, as nobody sees it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from llorch.pytorch.cache import Cache, Place
from llorch.pytorch.causal_lm import Context, Heads, Keep, keep_nothing


def rotate_and_cache(
    q: Heads, k: Heads, v: Heads, layer: int, place: Place, cache: Cache, keep: Keep
) -> tuple[Heads, Context, Context]:
    """As that of the page; rotated keys are a tensor of their own where somebody observes."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    observed = keep is not keep_nothing
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k) if observed else k
    _launch(q, k, v, place, cache.keys[layer], cache.values[layer], q_rope, k_rope, keep_keys=observed)
    q_rope = keep("q_rope", q_rope)
    if observed and (used := keep("k_rope", k_rope)) is not k_rope:  # others are to be used from here on
        cache.append(layer, used, v, place)
    keys, values = cache.keys[layer][:, :, : place.ctx], cache.values[layer][:, :, : place.ctx]
    return q_rope, keep("k_cache", keys), keep("v_cache", values)


def _launch(
    q: Heads, k: Heads, v: Heads, place: Place, keys: Context, values: Context,
    q_rope: Heads, k_rope: Heads, *, keep_keys: bool,
) -> None:  # fmt: skip
    batch, seq, n_heads, head_dim = q.shape
    kv_heads, n_slots = keys.shape[1:3]
    _rotate[(batch * seq, 3)](
        q, k, v, place.slots, place.cos, place.sin, q_rope, k_rope, keys, values, seq, n_heads, kv_heads, n_slots,
        KEEP_KEYS=keep_keys, HALF=head_dim // 2, COLUMNS=triton.next_power_of_2(head_dim // 2),
        HEADS=triton.next_power_of_2(n_heads), KV_HEADS=triton.next_power_of_2(kv_heads),
    )  # fmt: skip


@triton.jit
@no_type_check
def _rotate(
    q, k, v, slots, cos, sin, q_rope, k_rope, keys, values, seq, n_heads, kv_heads, n_slots,
    KEEP_KEYS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0)[None, :]
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0)[None, :]
    if part == 0:  # a name has one shape in all branches
        head = tl.arange(0, HEADS)
        at, there = _first_halves(token * n_heads + head, head < n_heads, column, HALF)
        _turn(q + at, q_rope + at, there, c, s, HALF)
    else:
        kv_head = tl.arange(0, KV_HEADS)
        new, new_there = _first_halves(token * kv_heads + kv_head, kv_head < kv_heads, column, HALF)
        row = (token // seq * kv_heads + kv_head) * n_slots + tl.load(slots + token)
        cached = row[:, None] * (2 * HALF) + column[None, :]
        if part == 1:
            _turn(k + new, keys + cached, new_there, c, s, HALF)
            if KEEP_KEYS:
                _turn(k + new, k_rope + new, new_there, c, s, HALF)
        else:
            tl.store(values + cached, tl.load(v + new, mask=new_there), mask=new_there)
            tl.store(values + cached + HALF, tl.load(v + new + HALF, mask=new_there), mask=new_there)


@triton.jit
@no_type_check
def _first_halves(head, head_there, column, HALF: tl.constexpr):
    """Where the first halves of some heads lie, (heads, half), and which of the places are there."""
    return head[:, None] * (2 * HALF) + column[None, :], head_there[:, None] & (column < HALF)[None, :]


@triton.jit
@no_type_check
def _turn(source, target, there, c, s, HALF: tl.constexpr):
    """Turn the pairs (j, j + half) of some heads."""
    first = tl.load(source, mask=there, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0).to(tl.float32)
    tl.store(target, (first * c - second * s).to(target.dtype.element_ty), mask=there)
    tl.store(target + HALF, (second * c + first * s).to(target.dtype.element_ty), mask=there)
