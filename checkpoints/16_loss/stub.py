"""Lesson 16: the loss. Choose the learned tokens, match rows of logits with labels, and add up the loss.

Write the bodies of `masked_labels`, `shifted` and `cross_entropy`, save, and check them: llorch learn check 16
-100 is the label of a token that is not learned, as in torch and transformers.
"""

import numpy as np

IGNORED = -100


def masked_labels(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Return the label of every token.

    Args:
        ids: Token ids, (seq,), int64.
        learned: Whether each token is to be learned, (seq,), bool: the answer is, the prompt is not.

    Returns:
        (seq,), int64: the id of the token, or -100.
    """
    raise NotImplementedError


def shifted(labels: np.ndarray) -> np.ndarray:
    """Return the label that every row of logits should predict.

    Args:
        labels: Label of every token, (seq,), int64.

    Returns:
        (seq,), int64: row t predicts token t + 1; the last row nothing, -100.
    """
    raise NotImplementedError


def cross_entropy(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    """Add up the surprise of the rows that are learned.

    Args:
        logits: One row a token, (seq, vocab), float32; values may be in the hundreds.
        labels: Label of every row, already shifted, (seq,); -100: the row does not count.
        label_smoothing: e, the share of the target that is spread over the whole vocabulary; 0 to 1.

    Returns:
        Sum of the losses, in nats, and the number of rows in this sum.
    """
    raise NotImplementedError
