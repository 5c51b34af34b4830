"""Lesson 01b: RoPE. Turn pairs of numbers in every head by an angle that grows with the position.

Write the four functions, one line or a few each, save, and check them: llorch learn check 01b
llorch fills in the functions that you have not written, so you can check them one by one.
"""

import numpy as np


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Compute the angle of each pair from one position to the next, in radians, fastest first.

    Args:
        head_dim: Numbers in a head: twice the number of pairs.
        theta: The base, `rope_theta`: 1e4, 5e5 or 1e6.

    Returns:
        (head_dim // 2,), float64.
    """
    raise NotImplementedError


def scale_frequencies(inv_freq: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Slow pairs down for a longer context. Called only if the model's file asks for it.

    Args:
        inv_freq: Result of `frequencies`, (half,), float64.
        factors: One divisor per pair, (half,), float64; 1 changes nothing.

    Returns:
        (half,), float64.
    """
    raise NotImplementedError


def rope_tables(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute cosine and sine of the angle of every position and pair.

    Args:
        positions: Positions of the tokens in the text, (seq,), whole numbers; the first need not be 0.
        inv_freq: Radians per position, (half,), float64.

    Returns:
        cos and sin, (seq, half) each, float64: float32 angles are off by 1e-4 at position 4000.
    """
    raise NotImplementedError


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn every head of every token.

    Args:
        x: Queries or keys, (seq, heads, head_dim), float32; number j makes a pair with number j + half.
        cos: (seq, half), float64.
        sin: (seq, half), float64.

    Returns:
        Shape and dtype of `x`.
    """
    raise NotImplementedError
