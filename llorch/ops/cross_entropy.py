"""Cross entropy: how surprised the model is by the tokens that came, and which way the logits should move.

    nll   = -log p[label]            p = softmax(logits), log p = logits - max - log(sum(exp(logits - max)))
    token = (1 - e) nll + e mean(-log p)            e = label smoothing, mean over the vocabulary
    loss  = sum of token over the trained rows / n_trained
    dL/dlogits = (p - target) / n_trained            target = (1 - e) [one at label] + e / vocab; 0 in other rows

Numerator and denominator are kept apart, so that a step of several batches divides once, by the tokens of all of them.

Source: torch.nn.functional.cross_entropy (its label smoothing); arXiv:1512.00567 section 7.
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.precision import widen
from llorch.runtime.errors import UserError

IGNORED = -100  # label of a row that is not trained, as in torch and transformers


def shifted(labels: Int[np.ndarray, " seq"]) -> Int[np.ndarray, " seq"]:
    """Shift labels to the rows of logits of one document: row t predicts token t + 1, the last row nothing."""
    return np.append(labels[1:], IGNORED)


def cross_entropy(
    logits: Float[np.ndarray, "seq vocab"], labels: Int[np.ndarray, " seq"], *, label_smoothing: float
) -> tuple[float, int]:
    """Add up the loss of the trained rows.

    Args:
        logits: One row per token.
        labels: What each row should have predicted, see `shifted`; `IGNORED` for rows that are not trained.
        label_smoothing: Share of the target that is spread over the whole vocabulary, 0 to 1.

    Returns:
        Sum of the losses, and how many rows it is the sum of.

    Raises:
        ValueError: No row is trained, or a label is no token.
    """
    rows = trained_rows(labels, logits.shape[1])
    log_p = log_softmax(logits[rows])
    nll = -log_p[np.arange(len(rows)), labels[rows]]
    losses = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(axis=-1, dtype=np.float64)
    return float(losses.sum(dtype=np.float64)), len(rows)


def cross_entropy_backward(
    logits: Float[np.ndarray, "seq vocab"],
    labels: Int[np.ndarray, " seq"],
    *,
    label_smoothing: float,
    n_trained: int,
) -> Float[np.ndarray, "seq vocab"]:
    """Gradient of the mean loss by the logits, 0 for rows that are not trained; `cross_entropy` says the arguments.

    `n_trained` is the number of trained tokens of the whole optimizer step, by which the sum is divided.
    """
    rows = trained_rows(labels, logits.shape[1])
    d_rows = np.exp(log_softmax(logits[rows])) - label_smoothing / logits.shape[1]
    d_rows[np.arange(len(rows)), labels[rows]] -= 1 - label_smoothing
    d_logits = np.zeros_like(logits)
    d_logits[rows] = d_rows / n_trained
    return d_logits


def trained_rows(labels: Int[np.ndarray, " seq"], vocab_size: int) -> Int[np.ndarray, " trained"]:
    """Which rows are trained; ValueError when none is or when a label is no token."""
    (rows,) = np.nonzero(labels != IGNORED)
    if not len(rows):
        raise UserError(f"cross entropy: expected a label to train on, got {len(labels)} rows that are all {IGNORED}")
    wrong = rows[(labels[rows] < 0) | (labels[rows] >= vocab_size)]
    if len(wrong):
        raise UserError(
            f"cross entropy: labels must be token ids from 0 to {vocab_size - 1} or {IGNORED}, "
            f"got {labels[wrong[0]]} in row {wrong[0]}"
        )
    return rows


def log_softmax(logits: Float[np.ndarray, "rows vocab"]) -> Float[np.ndarray, "rows vocab"]:
    """Logarithm of the softmax; small arrays give float64."""
    (wide,) = widen(logits)
    below = wide - wide.max(axis=-1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(wide.dtype, copy=False)
