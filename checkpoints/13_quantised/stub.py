"""Lesson 13: the bytes of a block, and the 32 numbers that they stand for.

Write the bodies of `q8_0` and `q4_0`, save, and check them: llorch learn check 13
The bits must equal ggml's: compute in float32, code times scale.
"""

import numpy as np


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """Decode Q8_0: a scale and 32 whole numbers.

    Args:
        blocks: One block a row, (n, 34), uint8: two bytes of a float16, then 32 bytes, each a signed number.

    Returns:
        (n, 32), float32: scale times number.
    """
    raise NotImplementedError


def q4_0(blocks: np.ndarray) -> np.ndarray:
    """Decode Q4_0: a scale and 32 numbers of four bits, 0 to 15, where 8 stands for zero.

    Args:
        blocks: One block a row, (n, 18), uint8: two bytes of a float16, then 16 bytes. The low halves of the bytes are
            the elements 0 to 15, the high halves 16 to 31.

    Returns:
        (n, 32), float32: scale times (number - 8).
    """
    raise NotImplementedError
