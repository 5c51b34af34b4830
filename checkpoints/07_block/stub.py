"""Lesson 07: the block. Put the parts together: attention, then feed-forward, each added to its input.

Write `block`, save, and check it: llorch learn check 07, then the same with --chain
Its imports are your functions, or llorch's if you have not written them.
"""

from collections.abc import Mapping

import numpy as np
from l01_rms_norm import rms_norm
from l01b_rope import rope
from l02_qkv import qkv
from l03_kv_cache import append
from l04_attention_scores import attention_probs, attention_scores
from l05_attention_output import attention_context, attention_output
from l06_swiglu import feed_forward


def block(
    x: np.ndarray,
    w: Mapping[str, np.ndarray],
    cos: np.ndarray,
    sin: np.ndarray,
    past_k: np.ndarray,
    past_v: np.ndarray,
    head_dim: int,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run one layer: norm, attention, add; norm, feed-forward, add.

    Args:
        x: The residual stream of the new tokens, (seq, hidden), float32.
        w: Weights of this layer: attn_norm, q_proj, k_proj, v_proj, o_proj, ffn_norm, gate_proj, up_proj, down_proj;
            if the family has them, also q_bias, k_bias, v_bias, o_bias, q_norm, k_norm (`w.get` gives None if not).
        cos: Cosines of the new tokens' positions, (seq, head_dim / 2), float64.
        sin: Their sines.
        past_k: Rotated keys of the tokens before, (kv_heads, cached, head_dim); cached may be 0.
        past_v: Their values.
        head_dim: Width of a head.
        eps: For every norm.

    Returns:
        The stream after the block, (seq, hidden), and both caches with the new tokens in them.
    """
    raise NotImplementedError
