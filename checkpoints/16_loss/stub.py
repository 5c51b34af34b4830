"""Lesson 16: the loss. Which tokens are learned, which row of logits is judged by which label, and what it costs.

Write the bodies of `masked_labels`, `shifted` and `cross_entropy`, save, and check them: llorch learn check 16
-100 is the label of what is not learned, as in torch and transformers.
"""

import numpy as np

IGNORED = -100


def masked_labels(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """The label of every token.

    Args:
        ids: Token ids, (seq,), int64.
        learned: Whether each token is to be learned, (seq,), bool: the answer is, the prompt is not.

    Returns:
        (seq,), int64: the token's own id, or -100.
    """
    raise NotImplementedError


def shifted(labels: np.ndarray) -> np.ndarray:
    """What every row of logits should predict.

    Args:
        labels: Of every token, (seq,), int64.

    Returns:
        (seq,), int64: row t predicts token t + 1; the last row nothing, -100.
    """
    raise NotImplementedError


def cross_entropy(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    """Add up the surprise of the rows that are learned.

    Args:
        logits: One row a token, (seq, vocab), float32; values may be in the hundreds.
        labels: What every row should have predicted, shifted already, (seq,); -100: the row does not count.
        label_smoothing: e, the share of the target that is spread over the whole vocabulary; 0 to 1.

    Returns:
        Sum of the losses, in nats, and how many rows it is the sum of.
    """
    raise NotImplementedError
