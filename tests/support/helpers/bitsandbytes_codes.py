"""The code books that bitsandbytes' CPU kernel really uses: its values, and thresholds found by asking the kernel.

The kernel need not take the nearest code (0.50 looks x / absmax up in a table of 65536 even steps). Which one it takes
is told by 255 thresholds, each found here to the last bit.
"""

import numpy as np
import pytest

from llorch.pytorch.train.eight_bit import BLOCK, CodeBook

BOUNDARIES = np.arange(255)


def kernel_book(*, signed: bool) -> CodeBook:
    """Values and thresholds of one of its two books."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="NOT RUN: bitsandbytes is not installed")
    values = functional.create_dynamic_map(signed=signed)

    def codes(x: np.ndarray) -> np.ndarray:
        return kernel_codes(np.append(x, np.float32(1)), values.numpy())[:-1].astype(int)

    one = int(np.float32(1).view(np.int32))
    low, high = np.full(255, -one if signed else 0), np.full(255, one)  # floats counted from 0, so they can be halved
    while (high - low > 1).any():
        middle = (low + high) // 2
        above = codes(_float(middle)) > BOUNDARIES
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    unreached = codes(_float(low)) > BOUNDARIES
    return CodeBook(values.numpy(), np.where(unreached, np.float32(-1), _float(low)))


def kernel_codes(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What the kernel makes of numbers in blocks of 256."""
    import bitsandbytes.functional as functional
    import torch

    return functional.quantize_blockwise(torch.from_numpy(x), torch.from_numpy(values), blocksize=BLOCK)[0].numpy()


def _float(count: np.ndarray) -> np.ndarray:
    """The float32 that is so many steps from 0."""
    return np.sign(count).astype(np.float32) * np.abs(count).astype(np.int32).view(np.float32)
