"""Lesson 15: LoRA. A narrow trained detour beside a frozen matrix: what it adds, and how strongly.

Write the bodies of `lora_scaling` and `lora_delta`, save, and check them: llorch learn check 15
The frozen product W x is made elsewhere; `lora_delta` gives only what is added to it.
"""

import numpy as np


def lora_scaling(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
    """The factor of one matrix's detour.

    Args:
        r: Rank of the adapter as a whole.
        lora_alpha: Its alpha.
        own_r: Rank of this matrix, where `rank_pattern` gives it one of its own; else None.
        own_alpha: Likewise its alpha, by `alpha_pattern`.
        use_rslora: Whether the scale is rank-stabilised.

    Returns:
        A number.
    """
    raise NotImplementedError


def lora_delta(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    """What the adapter adds to the frozen projection of every row.

    Args:
        x: What goes into the projection, (seq, in), float32.
        lora_A: The way down, (r, in).
        lora_B: The way up again, (out, r).
        scaling: Of `lora_scaling`.

    Returns:
        (seq, out), dtype of `x`.
    """
    raise NotImplementedError
