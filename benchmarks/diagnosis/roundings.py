"""Roundings to narrower types, and sums in other orders, as right engines apply them to arrays.

Sums are written term by term, to show the order; they are slow.
"""

import numpy as np

Array = np.ndarray


def bf16(x: Array) -> Array:
    """Round to the nearest bfloat16, the upper half of a float32, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF_0000)
    return bits.view(np.float32).astype(x.dtype)


def stored_bits(x: Array, dtype: str) -> Array:
    """Return an array as written to a file; bfloat16 as the upper halves of its float32."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    return (np.ascontiguousarray(bf16(x), np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def f32(x: Array) -> Array:
    """Round to the nearest float32."""
    return x.astype(np.float32)


def f16(x: Array) -> Array:
    """Round to the nearest float16."""
    return x.astype(np.float16).astype(x.dtype)


def tf32(x: Array) -> Array:
    """Cut off all but ten bits after the point, as tensor cores do with a float32."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF_E000)).view(np.float32).astype(x.dtype)


def q8_0(x: Array) -> Array:
    """Round to codes of eight bits, in blocks of 32 with a float16 scale, along the last axis."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    codes = np.rint(blocks * np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0))
    return (codes * f16(largest / 127)).reshape(x.shape).astype(x.dtype)


def one_by_one(x: Array, w: Array) -> Array:
    """Sum all terms in order, from the first to the last."""
    total = np.zeros((len(x), len(w)), x.dtype)
    for term in range(x.shape[-1]):
        total += x[:, term, None] * w[:, term]
    return total


def backwards(x: Array, w: Array) -> Array:
    """Sum all terms in reverse order, from the last to the first."""
    return one_by_one(x[:, ::-1], w[:, ::-1])


def in_blocks(x: Array, w: Array, *, size: int = 16) -> Array:
    """Sum each block of terms, then sum the blocks."""
    parts = [one_by_one(x[:, i : i + size], w[:, i : i + size]) for i in range(0, x.shape[-1], size)]
    return np.cumsum(np.stack(parts, axis=-1), axis=-1)[..., -1]


def in_lanes(x: Array, w: Array, *, lanes: int = 8) -> Array:
    """Keep as many running sums as a vector register has lanes, and add them up at the end."""
    parts = [one_by_one(x[:, lane::lanes], w[:, lane::lanes]) for lane in range(min(lanes, x.shape[-1]))]
    return np.cumsum(np.stack(parts, axis=-1), axis=-1)[..., -1]


def kahan(x: Array, w: Array) -> Array:
    """Sum the terms and carry the part that each addition lost (Kahan)."""
    total = lost = np.zeros((len(x), len(w)), x.dtype)
    for index in range(x.shape[-1]):
        term = x[:, index, None] * w[:, index] - lost
        updated = total + term
        total, lost = updated, (updated - total) - term
    return total


def in_float64(x: Array, w: Array) -> Array:
    """Sum in float64 and round once."""
    return (x.astype(np.float64) @ w.T.astype(np.float64)).astype(x.dtype)
