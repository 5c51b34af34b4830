"""Lesson 01: RMSNorm. Bring every row to unit root mean square, then apply the learned gain.

Write the body of `rms_norm`, save, and check it: llorch learn check 01
The model uses it twice in every layer and once after the last one. Later lessons import it from here.
"""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Normalise the last axis, each row alone.

    Args:
        x: Rows, (..., width), float32: one row a token.
        weight: The gain, (width,), one number for every element of a row.
        eps: Small number, added to the mean square: 1e-5 (Llama) or 1e-6 (Qwen).

    Returns:
        Shape and dtype of `x`.
    """
    raise NotImplementedError
