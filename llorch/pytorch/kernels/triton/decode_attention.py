"""Attention of one new token per sequence, the context split between programs; the reference: `causal_lm.attention`.

A program takes one key head with all its query heads, so that its keys and values are read once, and one part of the
slots. It leaves a maximum, a sum of powers and a sum of values; a second kernel puts the parts together. Slots that
are not seen are not read, and which they are is told by the mask on the device: nothing depends on values that the host
would have to know, so that a CUDA graph can hold it.

Both products sum in float32. Half precision probabilities go into the second product as two numbers, p rounded and the
rest that rounding lost, so that no error of p is seen after the rounding of the result.

Source: split-KV decoding as in https://pytorch.org/blog/flash-decoding.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from llorch.pytorch.cache import Visible
from llorch.pytorch.causal_lm import Context, Heads, Keep
from llorch.pytorch.kernels.sdpa import sdpa_attention

_BLOCK_BYTES = 64  # slots that a program looks at in one go, times the size of an element: what registers hold
_PROGRAMS = 256  # as many parts as make so many programs: about two for each multiprocessor of a large device
_LEAST = 16  # rows and columns of a product on tensor cores


def decode_attention(q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
    """Compute `attention` of `causal_lm`, each token seeing a slot; more than one token goes to `sdpa_attention`."""
    if q.shape[1] != 1:
        return sdpa_attention(q, keys, values, visible, keep)
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.contiguous(), keys, values))
    batch, _, n_heads, head_dim = q.shape
    part = _slots_of_a_part(keys.shape[2], block=_BLOCK_BYTES // q.element_size(), rows=batch * keys.shape[1])
    n_parts = -(-keys.shape[2] // part)
    sums = q.new_empty(batch, n_heads, n_parts, head_dim, dtype=torch.float32)
    ends = sums.new_empty(2, batch, n_heads, n_parts)  # maximum of the scores, sum of their powers
    _launch_parts(q, keys, values, visible, sums, ends, part)
    context = q.new_empty(q.shape)
    _combine[(batch * n_heads,)](
        sums, ends, context, batch * n_heads, n_parts, head_dim,
        PARTS=triton.next_power_of_2(n_parts), WIDTH=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return context


def _slots_of_a_part(ctx: int, *, block: int, rows: int) -> int:
    """So many whole blocks that there are enough parts, for each of some rows, to keep the device busy."""
    blocks = -(-ctx // block)
    n_parts = min(blocks, max(1, _PROGRAMS // rows))
    return -(-blocks // n_parts) * block


def _launch_parts(
    q: Heads, keys: Context, values: Context, visible: Visible, sums: Tensor, ends: Tensor, part: int
) -> None:
    """Fill `sums` and `ends` for every key/value head and part of the context."""
    batch, _, n_heads, head_dim = q.shape
    kv_heads, ctx = keys.shape[1:3]
    group, n_parts = n_heads // kv_heads, sums.shape[2]
    seen = q if visible is None else visible.contiguous().view(torch.uint8)
    widen = q.dtype is torch.bfloat16 and knobs.runtime.interpret  # the interpreter multiplies its bits as integers
    _attend_part[(batch * kv_heads, n_parts)](
        q, keys, values, seen, sums, ends, math.log2(math.e) / math.sqrt(head_dim), part, ctx, kv_heads, group,
        batch * n_heads, head_dim, *keys.stride()[:3], *values.stride()[:3],
        MASKED=visible is not None, WIDEN=widen, BLOCK=_BLOCK_BYTES // q.element_size(),
        GROUP=max(_LEAST, triton.next_power_of_2(group)), WIDTH=max(_LEAST, triton.next_power_of_2(head_dim)),
    )  # fmt: skip


@triton.jit
@no_type_check
def _attend_part(
    q, keys, values, seen, sums, ends, scale, part, ctx, kv_heads, group, n_rows, head_dim,
    keys_batch, keys_head, keys_slot, values_batch, values_head, values_slot,
    MASKED: tl.constexpr, WIDEN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the context with all query heads of a key/value head; store unnormalised sums."""
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    member, column = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    row = (batch * kv_heads + kv_head) * group + member
    in_head = (column < head_dim)[None, :]
    there = (member < group)[:, None] & in_head
    queries = tl.load(q + row[:, None] * head_dim + column[None, :], mask=there, other=0)
    if WIDEN:
        queries = queries.to(tl.float32)
    keys += batch * keys_batch + kv_head * keys_head
    values += batch * values_batch + kv_head * values_head
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    powers = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, WIDTH), tl.float32)
    first = tl.program_id(1) * part
    for start in range(first, tl.minimum(first + part, ctx), BLOCK):
        slot = (start + tl.arange(0, BLOCK)).to(tl.int64)
        visible = slot < ctx
        if MASKED:
            visible = tl.load(seen + batch * ctx + slot, mask=visible, other=0) != 0
        reads = visible[:, None] & in_head
        key = tl.load(keys + slot[:, None] * keys_slot + column[None, :], mask=reads, other=0)
        value = tl.load(values + slot[:, None] * values_slot + column[None, :], mask=reads, other=0)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0, higher)  # nothing seen yet: inf - inf would be NaN
        shrink, power = tl.exp2(best - shift), tl.exp2(scores - shift[:, None])
        powers = powers * shrink + tl.sum(power, 1)
        mixed = _add_product(mixed * shrink[:, None], power, value)
        best = higher
    n_parts = tl.num_programs(1)
    at = row * n_parts + tl.program_id(1)
    tl.store(ends + at, best, mask=member < group)
    tl.store(ends + n_rows * n_parts + at, powers, mask=member < group)
    tl.store(sums + at[:, None] * head_dim + column[None, :], mixed, mask=there)


@triton.jit
@no_type_check
def _add_product(mixed, power, value):
    """Add power @ value, with nothing lost of the powers that float32 would keep."""
    rounded = power.to(value.dtype)
    mixed = tl.dot(rounded, value, mixed, input_precision="ieee")
    if value.dtype != tl.float32:
        lost = (power - rounded.to(tl.float32)).to(value.dtype)
        mixed = tl.dot(lost, value, mixed)
    return mixed


@triton.jit
@no_type_check
def _combine(sums, ends, context, n_rows, n_parts, head_dim, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Combine the parts of the context for one query head, and store the output of attention."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    at = row * n_parts + part
    best = tl.load(ends + at, mask=part < n_parts, other=float("-inf"))
    powers = tl.load(ends + n_rows * n_parts + at, mask=part < n_parts, other=0)
    there = (part < n_parts)[:, None] & (column < head_dim)[None, :]
    mixed = tl.load(sums + at[:, None] * head_dim + column[None, :], mask=there, other=0)
    weight = tl.exp2(best - tl.max(best, 0))
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(powers * weight, 0)
    tl.store(context + row * head_dim + column, result.to(context.dtype.element_ty), mask=column < head_dim)
