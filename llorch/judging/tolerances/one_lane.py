"""Variance of long sums in an engine that adds all keys one by one, into one number.

`tolerances.forward` assumes sums in 8 lanes. Its factor 4 also covers one lane if the terms have random signs. Terms of
one sign need more: their partial sums grow to the whole sum, and each addition is rounded to the digits of its partial
sum. Attention has three such sums: a score, the denominator of the softmax, and the context.

The probabilities p show the partial sums. With P_k the sum of p up to key k, the denominator has been rounded by up to
2^-24 P_k at each key, relative to the whole. Its error moves the whole row, so the largest rounding counts, as for a
single rounding. A context y has the partial sums P_k y, if values are alike, and the root of the sum of (p v)^2, if
they have random signs. Both count, each rounding with its mean, a third. A score has head_dim terms, with partial sums
of k / head_dim of the score.

A term below 2^-24 P_k may not change the sum. The sum of such lost terms is a largest error, not a deviation.

Source: N. Higham, Accuracy and Stability, 4.2 (recursive summation).
"""

import numpy as np

from llorch.judging.tolerances.rounding import UNIT

SCORES = UNIT**2 / 9  # variance of a score, per term and per squared score
_OF_BOUNDS = 2  # divides a largest error, of which a tolerance allows four


def denominator_variance(probs: np.ndarray) -> np.ndarray:
    """Derive the relative variance of the denominators of a softmax, (..., 1), from its probabilities."""
    sums, is_added = _partial_sums(probs)
    lost = np.where(is_added, 0, probs).sum(axis=-1, keepdims=True)
    return UNIT**2 * np.square(sums * is_added).sum(axis=-1, keepdims=True) + np.square(lost / _OF_BOUNDS)


def context_variance(probs: np.ndarray, v: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Derive the variance of sums `y` of values by their probabilities; axes of matrix products, broadcast."""
    sums, is_added = _partial_sums(probs)
    n_later = np.flip(np.cumsum(np.flip(is_added, -1), axis=-1, dtype=probs.dtype), -1)  # from the term on
    of_one_sign = np.square(sums * is_added).sum(axis=-1, keepdims=True) * np.square(y)
    of_random_signs = (np.square(probs) * n_later) @ np.square(v)
    lost = np.where(is_added, 0, probs)
    loss = np.square(lost @ v / _OF_BOUNDS) + np.square(lost) @ np.square(v)
    return UNIT**2 / 3 * (of_one_sign + of_random_signs) + loss


def _partial_sums(probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the partial sums along the last axis, and the terms that change them."""
    sums = np.cumsum(probs, axis=-1)
    return sums, (probs > 0) & (probs >= UNIT * sums)
