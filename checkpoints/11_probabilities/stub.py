"""Lesson 11: from logits to the distribution that a token is drawn from. Five small functions and the chain of them.

Write them in this order, save, and check them: llorch learn check 11
A filter takes logits and gives logits; a token that it removes gets -inf.
"""

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Make probabilities: positive numbers that sum to 1.

    Args:
        logits: (vocab,), float64; -inf for removed tokens, whose probability is 0.

    Returns:
        (vocab,), float64.
    """
    raise NotImplementedError


def penalise(logits: np.ndarray, history: np.ndarray, penalty: float) -> np.ndarray:
    """Make tokens that were seen less likely: a positive logit is divided, a negative one multiplied.

    Args:
        logits: (vocab,), float64.
        history: All token ids so far, (n,), int64; some occur more than once, and count once.
        penalty: 1 changes nothing.

    Returns:
        (vocab,), float64: a new array.
    """
    raise NotImplementedError


def keep_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Keep the k largest logits, and those equal to the smallest of them.

    Args:
        logits: (vocab,), float64.
        k: How many; 0, or more than there are, keeps all.

    Returns:
        (vocab,), float64.
    """
    raise NotImplementedError


def keep_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Keep the fewest likeliest tokens whose probabilities sum to at least p.

    Args:
        logits: (vocab,), float64; -inf for tokens that were removed before.
        p: Share of the probability; 1 keeps all.

    Returns:
        (vocab,), float64.
    """
    raise NotImplementedError


def keep_min_p(logits: np.ndarray, min_p: float) -> np.ndarray:
    """Keep tokens that are at least min_p times as likely as the likeliest one.

    Args:
        logits: (vocab,), float64; -inf for tokens that were removed before.
        min_p: 0 keeps all.

    Returns:
        (vocab,), float64.
    """
    raise NotImplementedError


def distribution(
    logits: np.ndarray,
    history: np.ndarray,
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> np.ndarray:
    """Run the chain: penalty, temperature (logits are divided by it), top-k, top-p, min-p, softmax.

    Args:
        logits: (vocab,), float64.
        history: All token ids so far, (n,), int64.
        penalty: For `penalise`.
        temperature: Above 0.
        top_k: For `keep_top_k`.
        top_p: For `keep_top_p`.
        min_p: For `keep_min_p`.

    Returns:
        Probabilities, (vocab,), float64.
    """
    raise NotImplementedError
