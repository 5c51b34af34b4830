"""Lesson 20: merge and export. The detour merged into the matrix, and the same adapter in llama.cpp's format.

Write the bodies of `merged`, `interleave` and `gguf_alpha`, save, and check them: llorch learn check 20
The results are compared with PEFT's merge and with the file that llama.cpp loaded.
"""

import numpy as np


def merged(weight: np.ndarray, lora_A: np.ndarray, lora_B: np.ndarray, scaling: float) -> np.ndarray:
    """Return the matrix with the merged adapter.

    Args:
        weight: The frozen matrix, (out, in), float32.
        lora_A: (r, in).
        lora_B: (out, r).
        scaling: alpha / r.

    Returns:
        W + s B A, (out, in), rounded once to the dtype of `weight`.
    """
    raise NotImplementedError


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows of q or k for a Llama GGUF file: in pairs instead of in halves.

    Args:
        rows: (n_heads * head_dim, columns), heads one after the other; in each head first half, then second half.
        n_heads: Number of heads.

    Returns:
        The same rows. In each head: the first of its first half, the first of its second half, the second of its first
        half, and so on.
    """
    raise NotImplementedError


def gguf_alpha(lora_alpha: float, scalings: np.ndarray, ranks: np.ndarray) -> float:
    """Return the only alpha of a LoRA GGUF file. llama.cpp computes alpha / r from it for every matrix.

    Args:
        lora_alpha: Alpha of the adapter's configuration.
        scalings: Right factor of the product of every matrix, (matrices,), float64.
        ranks: Rank of every matrix, (matrices,), int64.

    Returns:
        An alpha from which every matrix gets its scale; 0 where none does, then scales are multiplied into B.
    """
    raise NotImplementedError
