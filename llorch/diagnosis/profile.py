"""Location of a stage's error: its tokens, heads and channels, and its size in steps of float32."""

import math

import numpy as np
from jaxtyping import Float

from llorch.diagnosis.verdict import Profile
from llorch.families.config import ModelConfig
from llorch.stages.table import Stage

MAX_STRETCHES = 512  # of a vocabulary
N_ULPS = 26  # 0, up to 1, 2, 4 ... 2^23, which is the number itself; and all that is farther off
AT_ONCE = 2**22  # elements that are looked at


def profile(
    actual: Float[np.ndarray, "*shape"], expected: Float[np.ndarray, "*shape"], stage: Stage, config: ModelConfig
) -> Profile:
    """Find the tokens, heads and channels in which two arrays differ.

    Args:
        actual: The stage as the engine showed it; rows of some tokens suffice.
        expected: Right values of the same tokens; entries that both mask with -inf are equal.
        stage: Its row of the table.
        config: The model.

    Returns:
        Relative error of each token, head and channel, infinite where zero is right and the engine has another value;
        no heads for a stage without them, and at most `MAX_STRETCHES` stretches of logits. Also a count of the errors
        by their size in float32 ulps.
    """
    theirs, ours = (by_token(array, stage, config) for array in (actual, expected))
    n_tokens, n_heads, width = ours.shape
    stretches = np.arange(width) * min(width, MAX_STRETCHES) // width if stage.name == "logits" else np.arange(width)
    tokens, heads, channels = np.zeros((2, n_tokens)), np.zeros((2, n_heads)), np.zeros((2, width))
    ulps = np.zeros(N_ULPS, np.int64)
    step = max(1, AT_ONCE // (n_heads * width))
    for start in range(0, n_tokens, step):
        rows = slice(start, start + step)
        off, right = _absolute_differences(theirs[rows], ours[rows])
        ulps += _ulps(off, right)
        for at, squares in enumerate((np.square(off), np.square(right))):
            tokens[at, rows] = squares.sum(axis=(1, 2))
            heads[at] += squares.sum(axis=(0, 2))
            channels[at] += squares.sum(axis=(0, 1))
    shares = _share(np.stack([np.bincount(stretches, weights=of) for of in channels]))
    return Profile(_share(tokens), _share(heads) if has_heads(stage) else None, shares, ulps)


def has_heads(stage: Stage) -> bool:
    """Tell if a stage, or its width, is cut into heads."""
    return bool({"heads", "kv_heads", "q_width", "kv_width"} & set(stage.axes.split()))


def by_token(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Reshape a stage to (token, head, channel); one head if the stage has none."""
    axes = stage.axes.split()
    if axes[-1] in ("q_width", "kv_width"):
        return array.reshape(len(array), -1, config.head_dim)
    if len(axes) == 2:
        return array[:, None]
    return array if axes[0] == "seq" else array.swapaxes(0, 1)


def _absolute_differences(actual: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return absolute differences and the right values, in float64; 0 where both mask."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    masked = np.isneginf(b)
    with np.errstate(invalid="ignore"):
        off = np.where(masked & np.isneginf(a), 0.0, np.abs(a - b))
    return np.where(np.isnan(off), math.inf, off), np.where(masked, 0.0, b)


def _ulps(off: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Count the errors by their number of float32 steps, in bins of powers of two; bin 0 holds exact values."""
    size = np.fmin(np.abs(right), 2.0**127).astype(np.float32)  # whose next number float32 has, too
    step = np.spacing(size).astype(np.float64)
    with np.errstate(divide="ignore"):
        n = np.ceil(np.log2(off / step))
    bins = np.where(off == 0, 0, np.clip(n, 0, N_ULPS - 2) + 1)
    return np.bincount(bins.astype(np.int64).ravel(), minlength=N_ULPS)


def _share(squares: np.ndarray) -> np.ndarray:
    """Divide norms of the difference by norms of the right values."""
    off, size = np.sqrt(squares)
    return np.where(size > 0, off / np.where(size > 0, size, 1.0), np.where(off > 0, math.inf, 0.0))
