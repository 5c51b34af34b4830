"""Attention of one new token per sequence, with the context split between programs; reference: `causal_lm.attention`.

A program computes one key head with all its query heads, so that keys and values are read once, and one part of the
slots. It stores a maximum, a sum of powers and a sum of values; a second kernel combines the parts. Invisible slots are
not read. The mask on the device marks them, so nothing depends on values that the host must know, and a CUDA graph can
record the kernel.

Both products sum in float32. Half precision probabilities enter the second product as two numbers, the rounded p and
its rounding error, so that rounding p changes nothing beyond the rounding of the result.

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

_BLOCK_BYTES = 64  # a program reads this many / element size slots at a time; limited by registers
_PROGRAMS = 256  # the context has enough parts for this many: about two per multiprocessor of a large device
_MIN_DOT = 16  # minimum rows and columns of a product on tensor cores


def decode_attention(q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
    """Compute `attention` of `causal_lm` for one token that sees a slot; more tokens use `sdpa_attention`."""
    if q.shape[1] != 1:
        return sdpa_attention(q, keys, values, visible, keep)
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.contiguous(), keys, values))
    batch, _, n_heads, head_dim = q.shape
    part_slots = _slots_per_part(keys.shape[2], block=_BLOCK_BYTES // q.element_size(), rows=batch * keys.shape[1])
    n_parts = -(-keys.shape[2] // part_slots)
    sums = q.new_empty(batch, n_heads, n_parts, head_dim, dtype=torch.float32)
    ends = sums.new_empty(2, batch, n_heads, n_parts)  # maximum of scores, sum of powers
    _launch_parts(q, keys, values, visible, sums, ends, part_slots)
    context = q.new_empty(q.shape)
    _combine[(batch * n_heads,)](
        sums, ends, context, batch * n_heads, n_parts, head_dim,
        PARTS=triton.next_power_of_2(n_parts), WIDTH=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return context


def _slots_per_part(ctx: int, *, block: int, rows: int) -> int:
    """Return a number of slots, in whole blocks, that gives each row enough parts to keep the device busy."""
    blocks = -(-ctx // block)
    n_parts = min(blocks, max(1, _PROGRAMS // rows))
    return -(-blocks // n_parts) * block


def _launch_parts(
    q: Heads, keys: Context, values: Context, visible: Visible, sums: Tensor, ends: Tensor, part_slots: int
) -> None:
    """Fill `sums` and `ends` for every key/value head and part of the context."""
    batch, _, n_heads, head_dim = q.shape
    kv_heads, ctx = keys.shape[1:3]
    group, n_parts = n_heads // kv_heads, sums.shape[2]
    mask = q if visible is None else visible.contiguous().view(torch.uint8)
    widen = q.dtype is torch.bfloat16 and knobs.runtime.interpret  # the interpreter multiplies bfloat16 as integers
    _attend_part[(batch * kv_heads, n_parts)](
        q, keys, values, mask, sums, ends, math.log2(math.e) / math.sqrt(head_dim), part_slots, ctx, kv_heads, group,
        batch * n_heads, head_dim, *keys.stride()[:3], *values.stride()[:3],
        MASKED=visible is not None, WIDEN=widen, BLOCK=_BLOCK_BYTES // q.element_size(),
        GROUP=max(_MIN_DOT, triton.next_power_of_2(group)), WIDTH=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
    )  # fmt: skip


@triton.jit
@no_type_check
def _attend_part(
    q, keys, values, seen, sums, ends, scale, part_slots, ctx, kv_heads, group, n_rows, head_dim,
    keys_batch, keys_head, keys_slot, values_batch, values_head, values_slot,
    MASKED: tl.constexpr, WIDEN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the context with all query heads of a key/value head; store unnormalised sums."""
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    member, column = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    row = (batch * kv_heads + kv_head) * group + member
    in_head = (column < head_dim)[None, :]
    in_group = (member < group)[:, None] & in_head
    queries = tl.load(q + row[:, None] * head_dim + column[None, :], mask=in_group, other=0)
    if WIDEN:
        queries = queries.to(tl.float32)
    keys += batch * keys_batch + kv_head * keys_head
    values += batch * values_batch + kv_head * values_head
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    powers = tl.zeros((GROUP,), tl.float32)
    context = tl.zeros((GROUP, WIDTH), tl.float32)
    first = tl.program_id(1) * part_slots
    for start in range(first, tl.minimum(first + part_slots, ctx), BLOCK):
        slot = (start + tl.arange(0, BLOCK)).to(tl.int64)
        visible = slot < ctx
        if MASKED:
            visible = tl.load(seen + batch * ctx + slot, mask=visible, other=0) != 0
        mask = visible[:, None] & in_head
        k_tile = tl.load(keys + slot[:, None] * keys_slot + column[None, :], mask=mask, other=0)
        v_tile = tl.load(values + slot[:, None] * values_slot + column[None, :], mask=mask, other=0)
        if WIDEN:
            k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
        scores = tl.dot(queries, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0, new_best)  # no visible slot yet: inf - inf would be NaN
        shrink, power = tl.exp2(best - shift), tl.exp2(scores - shift[:, None])
        powers = powers * shrink + tl.sum(power, 1)
        context = _add_product(context * shrink[:, None], power, v_tile)
        best = new_best
    n_parts = tl.num_programs(1)
    offsets = row * n_parts + tl.program_id(1)
    tl.store(ends + offsets, best, mask=member < group)
    tl.store(ends + n_rows * n_parts + offsets, powers, mask=member < group)
    tl.store(sums + offsets[:, None] * head_dim + column[None, :], context, mask=in_group)


@triton.jit
@no_type_check
def _add_product(total, power, v_tile):
    """Add power @ value, keeping the float32 precision of the powers."""
    rounded = power.to(v_tile.dtype)
    total = tl.dot(rounded, v_tile, total, input_precision="ieee")
    if v_tile.dtype != tl.float32:
        rounding_error = (power - rounded.to(tl.float32)).to(v_tile.dtype)
        total = tl.dot(rounding_error, v_tile, total)
    return total


@triton.jit
@no_type_check
def _combine(sums, ends, context, n_rows, n_parts, head_dim, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Combine the parts of the context for one query head, and store the output of attention."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    offsets = row * n_parts + part
    best = tl.load(ends + offsets, mask=part < n_parts, other=float("-inf"))
    powers = tl.load(ends + n_rows * n_parts + offsets, mask=part < n_parts, other=0)
    mask = (part < n_parts)[:, None] & (column < head_dim)[None, :]
    part_sums = tl.load(sums + offsets[:, None] * head_dim + column[None, :], mask=mask, other=0)
    weight = tl.exp2(best - tl.max(best, 0))
    output = tl.sum(part_sums * weight[:, None], 0) / tl.sum(powers * weight, 0)
    tl.store(context + row * head_dim + column, output.to(context.dtype.element_ty), mask=column < head_dim)
