"""Wrong code for RoPE, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def base_of_old(head_dim: int, theta: float) -> np.ndarray:
    return 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)


def base_of_qwen(head_dim: int, theta: float) -> np.ndarray:
    return 1_000_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)


def two_forgotten(head_dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(head_dim // 2) / head_dim)


def in_bfloat16(head_dim: int, theta: float) -> np.ndarray:
    inv_freq = (1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    upper = (inv_freq.view(np.uint32) + 0x8000) & 0xFFFF0000  # bfloat16 is the upper half of a float32
    return upper.view(np.float32).astype(np.float64)


def not_scaled(inv_freq: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return inv_freq


def all_scaled_alike(inv_freq: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return inv_freq / factors.max()


def multiplied(inv_freq: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return inv_freq * factors


def from_one(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = np.outer(positions + 1, inv_freq)
    return np.cos(angle), np.sin(angle)


def position_of_the_first(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = np.tile(positions[0] * inv_freq, (len(positions), 1))
    return np.cos(angle), np.sin(angle)


def counted_anew(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = np.outer(np.arange(len(positions)), inv_freq)
    return np.cos(angle), np.sin(angle)


def step_for_position(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    step = 0 if positions[0] == 0 else 1  # the prompt, then what follows
    angle = np.outer(step + np.arange(len(positions)), inv_freq)
    return np.cos(angle), np.sin(angle)


def in_half(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = np.outer(positions, inv_freq)
    return np.cos(angle).astype(np.float16).astype(np.float64), np.sin(angle).astype(np.float16).astype(np.float64)


def not_turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    return x


def neighbours_turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    cos, sin = cos[:, None, :], sin[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def turned_back(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1).astype(x.dtype)


def tables_exchanged(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    sin, cos = cos[:, None, :], sin[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def half_of_it(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    turned, kept = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, 0::2], sin[:, None, 0::2]  # every second speed: those of a head of half the size
    first, second = np.split(turned, 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin, kept]
    return np.concatenate(parts, axis=-1).astype(x.dtype)


WRONG = {
    "frequencies": {
        "rope-base-1e4": base_of_old,
        "rope-base-1e6": base_of_qwen,
        "rope-exponent-halved": two_forgotten,
        "rope-frequencies-in-bfloat16": in_bfloat16,
    },
    "scale_frequencies": {
        "rope-scaling-missing": not_scaled,
        "rope-scaling-linear": all_scaled_alike,
        "rope-scaling-inverted": multiplied,
    },
    "rope_tables": {
        "rope-position-plus-one": from_one,
        "rope-position-frozen": position_of_the_first,
        "rope-position-restarts": counted_anew,
        "rope-position-counts-steps": step_for_position,
        "rope-tables-in-half": in_half,
    },
    "rope": {
        "rope-missing": not_turned,
        "rope-interleaved-pairs": neighbours_turned,
        "rope-sign-flipped": turned_back,
        "rope-cos-and-sin-exchanged": tables_exchanged,
        "rope-first-half-only": half_of_it,
    },
}
UNTYPED = {
    "heads-cut-last": "typed in 07",
    "rope-before-norm": "typed in 07",
    "rope-position-by-head": "tables with one row per token do not broadcast along the heads, so NumPy raises an error",
    "rope-exponent-by-hidden-over-heads": "no function gets hidden_size and the number of heads, only head_dim",
}
