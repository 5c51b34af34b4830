"""Lesson 05: attention output. Mix the values by their shares, join the heads, project them back.

Write `attention_context` and `attention_output`, save, and check them: llorch learn check 05
The sum with the residual stream comes in lesson 07.
"""

import numpy as np


def attention_context(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Mix the values of the context, head by head, and join the heads of each token.

    Args:
        probs: Shares, (heads, seq, ctx), float32; every row sums to one.
        v: Values of the whole context, (kv_heads, ctx, head_dim); each value head serves heads // kv_heads
            neighbouring heads.

    Returns:
        (seq, heads * head_dim), dtype of `probs`: for every token head 0, then head 1, ...
    """
    raise NotImplementedError


def attention_output(context: np.ndarray, o_proj: np.ndarray, o_bias: np.ndarray | None) -> np.ndarray:
    """Bring the joined heads back to the width of the model.

    Args:
        context: (seq, heads * head_dim), float32.
        o_proj: (hidden, heads * head_dim): one row for every output.
        o_bias: (hidden,), or None: most models have none.

    Returns:
        (seq, hidden), dtype of `context`.
    """
    raise NotImplementedError
