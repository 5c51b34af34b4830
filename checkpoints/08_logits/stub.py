"""Lesson 08: logits. The last norm, then one number for every token of the vocabulary.

Write `logits`, save, and check it: llorch learn check 08, then the same with --chain
This lesson completes the forward pass.
"""

import numpy as np
from l01_rms_norm import rms_norm


def logits(
    x: np.ndarray, final_norm: np.ndarray, lm_head: np.ndarray | None, embed_tokens: np.ndarray, eps: float
) -> np.ndarray:
    """Turn the stream into scores of the next token.

    Args:
        x: The stream after the last block, (seq, hidden), float32.
        final_norm: The gain of the last norm, (hidden,).
        lm_head: The output matrix, (vocab, hidden), or None: a tied model has none and uses the table that made the
            embeddings.
        embed_tokens: That table, (vocab, hidden).
        eps: Of the norm.

    Returns:
        (seq, vocab), dtype of `x`: column t is the score of token t.
    """
    raise NotImplementedError
