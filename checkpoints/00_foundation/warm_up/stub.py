"""Warm-up: everything is written, but one constant is wrong.

Correct it, save, and check it: llorch learn check 00w
This line reads every model file in bfloat16.
"""

import numpy as np

UPPER_HALF = 8  # bits by which a bfloat16 has to be moved up to become a float32


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bit patterns to numbers.

    Args:
        bits: Bit patterns of any shape, uint16.

    Returns:
        The same shape, float32.
    """
    return (bits.astype(np.uint32) << UPPER_HALF).view(np.float32)
