"""Gradients by measuring: change one number a little either way and see what the result does."""

from collections.abc import Callable

import numpy as np

STEP = 1e-6


def numerical_gradient(result: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Central difference by every element of a small float64 array."""
    gradient = np.empty_like(x)
    for at in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[at] += STEP
        behind[at] -= STEP
        gradient[at] = (result(ahead) - result(behind)) / (2 * STEP)
    return gradient


def assert_is_gradient(
    actual: np.ndarray, result: Callable[[np.ndarray], float], x: np.ndarray, name: str = ""
) -> None:
    """`actual` is the derivative of `result` by `x`, to what a central difference can tell."""
    expected = numerical_gradient(result, x)
    assert np.abs(expected).max() > 1e-3, f"{name}: a gradient of 0 shows nothing"
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=1e-8 * max(1, np.abs(expected).max()), strict=True, equal_nan=False, err_msg=name
    )
