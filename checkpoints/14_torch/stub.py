"""Lesson 14: a norm and a rotation of torch tensors, in float32, bfloat16 and float16, on any device.

Write the bodies of `torch_rms_norm` and `torch_rope`, save, and check them: llorch learn check 14
Import torch inside the functions, so that the other lessons need not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, then multiply by the gain; in float32, rounded once.

    Args:
        x: (..., width), float32, bfloat16 or float16.
        weight: The gain, (width,), of the same dtype.
        eps: Added to the mean square, inside the root.

    Returns:
        Shape, dtype and device of `x`.
    """
    raise NotImplementedError


def torch_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of every token of a batch; in float32, rounded once.

    Args:
        x: Queries or keys, (batch, seq, heads, head_dim); number j makes a pair with number j + half.
        cos: (batch, seq, half), float32.
        sin: (batch, seq, half), float32.

    Returns:
        Shape, dtype and device of `x`.
    """
    raise NotImplementedError
