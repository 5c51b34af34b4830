"""Lesson 04: attention scores. Compare every query with every key it may see, then turn scores into shares.

Write `attention_scores` and `attention_probs`, save, and check them: llorch learn check 04
Each is checked alone: the second gets right scores while the first is not written yet.
"""

import numpy as np


def attention_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Compute scaled products of queries and keys, with -inf if the key lies after the query.

    Args:
        q: Rotated queries of the newest `seq` tokens, (seq, heads, head_dim), float32.
        k: Rotated keys of the whole context, (kv_heads, ctx, head_dim), oldest first. ctx >= seq: the tokens
            before the new ones come from the cache. Each key head serves heads // kv_heads neighbouring query heads.

    Returns:
        (heads, seq, ctx), dtype of `q`.
    """
    raise NotImplementedError


def attention_probs(scores: np.ndarray) -> np.ndarray:
    """Compute the softmax over the keys.

    Args:
        scores: (heads, seq, ctx), float32, -inf where a key is hidden; some are as large as 300.

    Returns:
        Shape and dtype of `scores`; every row of the last axis sums to one.
    """
    raise NotImplementedError
