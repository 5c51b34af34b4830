"""Cross entropy: negative log likelihood of the labels, with label smoothing, and its gradient by the logits.

    nll   = -log p[label]            p = softmax(logits), log p = logits - max - log(sum(exp(logits - max)))
    token = (1 - e) nll + e mean(-log p)            e = label smoothing, mean over the vocabulary
    loss  = sum of token over the trained rows / n_trained
    dL/dlogits = (p - target) / n_trained            target = (1 - e) [one at label] + e / vocab; 0 in other rows

Sum and count are returned separately: an optimizer step of several batches divides once, by the labels of all batches.

Source: torch.nn.functional.cross_entropy (its label smoothing); arXiv:1512.00567 section 7.
"""

import numpy as np
from jaxtyping import Float, Int

from llorch.ops.precision import widen
from llorch.runtime.errors import UserError

IGNORED = -100  # label of a row that is not in the loss, as in torch and transformers


def shifted(labels: Int[np.ndarray, " seq"]) -> Int[np.ndarray, " seq"]:
    """Shift labels to the logits of one document: row t predicts token t + 1, the last row is masked."""
    return np.append(labels[1:], IGNORED)


def cross_entropy(
    logits: Float[np.ndarray, "seq vocab"], labels: Int[np.ndarray, " seq"], *, label_smoothing: float
) -> tuple[float, int]:
    """Sum the loss of the trained rows.

    Args:
        logits: One row per token.
        labels: Next token of each row, see `shifted`; `IGNORED` for rows that are not in the loss.
        label_smoothing: Share of the target distribution that is uniform over the vocabulary, 0 to 1.

    Returns:
        Sum of the losses, and the number of rows in the loss.

    Raises:
        UserError: No row is in the loss, or a label is no token id.
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
    """Compute the gradient of the mean loss by the logits, 0 for rows that are not in the loss; see `cross_entropy`.

    `n_trained` is the number of labels in the whole optimizer step, the divisor of the loss.
    """
    rows = trained_rows(labels, logits.shape[1])
    d_rows = np.exp(log_softmax(logits[rows])) - label_smoothing / logits.shape[1]
    d_rows[np.arange(len(rows)), labels[rows]] -= 1 - label_smoothing
    d_logits = np.zeros_like(logits)
    d_logits[rows] = d_rows / n_trained
    return d_logits


def trained_rows(labels: Int[np.ndarray, " seq"], vocab_size: int) -> Int[np.ndarray, " trained"]:
    """Return the rows that are in the loss; UserError if there is none or a label is no token id."""
    (rows,) = np.nonzero(labels != IGNORED)
    if not len(rows):
        raise UserError(f"cross entropy: expected a label to train on, got {len(labels)} rows that are all {IGNORED}")
    bad_rows = rows[(labels[rows] < 0) | (labels[rows] >= vocab_size)]
    if len(bad_rows):
        raise UserError(
            f"cross entropy: labels must be token ids from 0 to {vocab_size - 1} or {IGNORED}, "
            f"got {labels[bad_rows[0]]} in row {bad_rows[0]}"
        )
    return rows


def log_softmax(logits: Float[np.ndarray, "rows vocab"]) -> Float[np.ndarray, "rows vocab"]:
    """Compute the logarithm of the softmax; small arrays give float64."""
    (wide_x,) = widen(logits)
    x = wide_x - wide_x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(wide_x.dtype, copy=False)
