"""Lesson 06b: a mixture of experts. A router chooses a few of many feed-forward parts for every token.

Write `top_k`, `topk_weights`, `expert_outputs` and `mixed`, save, and check them: llorch learn check 06b
The first two choose, the third computes, the last one adds up.
"""

import numpy as np
from l06_swiglu import swiglu


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Choose the experts with the largest scores of every token, largest first. Among equals, the lowest id first.

    Args:
        scores: Probabilities of all experts, (seq, experts), float32.
        k: How many are chosen.

    Returns:
        Their ids, counted from 0, (seq, k), int64.
    """
    raise NotImplementedError


def topk_weights(probs: np.ndarray, ids: np.ndarray, normalised: bool) -> np.ndarray:
    """Return the weight of each chosen expert: its probability.

    Args:
        probs: Probabilities of all experts, (seq, experts), float32.
        ids: Ids of the chosen experts, (seq, k).
        normalised: Whether the k weights of a token are brought to a sum of 1.

    Returns:
        (seq, k), dtype of `probs`, in the order of `ids`.
    """
    raise NotImplementedError


def expert_outputs(
    h: np.ndarray, ids: np.ndarray, gate_proj: np.ndarray, up_proj: np.ndarray, down_proj: np.ndarray
) -> np.ndarray:
    """Compute the feed-forward part of each chosen expert, only for the tokens of this expert.

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
    """Add the weighted outputs of a token's experts, and the shared expert times its gate.

    Args:
        outs: Output of each chosen expert, (seq, k, hidden), float32.
        weights: Weight of each chosen expert, (seq, k).
        shared: Output of the shared expert, (seq, hidden), or None if a model has none.
        gate: Gate of the shared expert, from 0 to 1, (seq, 1), or None.

    Returns:
        (seq, hidden), dtype of `outs`.
    """
    raise NotImplementedError
