"""Lesson 06b: a mixture of experts. A router chooses a few of many feed-forward parts for every token.

Write `top_k`, `topk_weights`, `expert_outputs` and `mixed`, save, and check them: llorch learn check 06b
The first two choose, the third computes, the last one adds up.
"""

import numpy as np
from l06_swiglu import swiglu


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """The experts with the largest scores of every token, the largest first; of equal ones the lowest id.

    Args:
        scores: Probabilities of all experts, (seq, experts), float32.
        k: How many are chosen.

    Returns:
        Their ids, counted from 0, (seq, k), int64.
    """
    raise NotImplementedError


def topk_weights(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    """What the output of each chosen expert is multiplied by: its probability.

    Args:
        probs: Probabilities of all experts, (seq, experts), float32.
        ids: Of the chosen ones, (seq, k).
        normalised: Whether the k weights of a token are brought to a sum of 1.

    Returns:
        (seq, k), dtype of `probs`, in the order of `ids`.
    """
    raise NotImplementedError


def expert_outputs(
    h: np.ndarray, ids: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
) -> np.ndarray:
    """The feed-forward part of each chosen expert, for its own tokens only.

    Args:
        h: Normalised tokens, (seq, hidden), float32.
        ids: The experts of each token, (seq, k).
        gate_proj: One matrix per expert, (experts, inter, hidden).
        up_proj: (experts, inter, hidden).
        down_proj: (experts, hidden, inter).

    Returns:
        (seq, k, hidden), dtype of `h`, in the order of `ids`; not yet weighted.
    """
    raise NotImplementedError


def mixed(outs: np.ndarray, weights: np.ndarray, shared: np.ndarray | None, gate: np.ndarray | None) -> np.ndarray:
    """The weighted sum of a token's experts, and the expert that every token has, as far as its gate is open.

    Args:
        outs: Of each chosen expert, (seq, k, hidden), float32.
        weights: Of each, (seq, k).
        shared: What the shared expert made, (seq, hidden), or None where a model has none.
        gate: From 0 to 1, (seq, 1), or None.

    Returns:
        (seq, hidden), dtype of `outs`.
    """
    raise NotImplementedError
