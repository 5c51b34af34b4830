"""Lesson 15: LoRA. A narrow trained detour next to a frozen matrix: its output and its scale.

Write the bodies of `lora_scaling` and `lora_delta`, save, and check them: llorch learn check 15
Other code computes the frozen product W x. `lora_delta` returns only the part that is added to it.
"""

import numpy as np


def lora_scaling(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
    """Compute the factor of one matrix's detour.

    Args:
        r: Rank of the adapter as a whole.
        lora_alpha: Alpha of the adapter.
        own_r: Rank of this matrix if `rank_pattern` sets one, else None.
        own_alpha: Alpha of this matrix if `alpha_pattern` sets one, else None.
        use_rslora: Whether the scale is rank-stabilised.

    Returns:
        A number.
    """
    raise NotImplementedError


def lora_delta(x: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    """Compute the adapter's contribution to every row of the frozen projection.

    Args:
        x: Input of the projection, (seq, in), float32.
        lora_A: The way down, (r, in).
        lora_B: The way up again, (out, r).
        scaling: Result of `lora_scaling`.

    Returns:
        (seq, out), dtype of `x`.
    """
    raise NotImplementedError
