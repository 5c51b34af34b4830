"""Wrong code for the loss, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def everything_learned(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    return ids.copy()


def labels_as_they_are(labels: np.ndarray) -> np.ndarray:
    return labels.copy()


def two_ahead(labels: np.ndarray) -> np.ndarray:
    return np.concatenate([labels[2:], [-100, -100]])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def surprise(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities of the learned rows, and the losses of their labels."""
    rows = np.flatnonzero(labels >= 0)
    log_p = log_softmax(logits[rows])
    return log_p, -np.take_along_axis(log_p, labels[rows][:, None], axis=-1)[:, 0]


def not_smoothed(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    _, nll = surprise(logits, labels)
    return float(nll.sum()), len(nll)


def all_rows_smoothed(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    _, nll = surprise(logits, labels)
    uniform = -log_softmax(logits).mean(axis=-1)  # of every row, learned or not
    return float((1 - label_smoothing) * nll.sum() + label_smoothing * uniform.sum()), len(nll)


def smoothing_on_top(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    log_p, nll = surprise(logits, labels)
    return float((nll - label_smoothing * log_p.mean(axis=-1)).sum()), len(nll)


def every_row_counted(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    log_p, nll = surprise(logits, labels)
    losses = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(axis=-1)
    return float(losses.sum()), len(logits)


def log_to_base_two(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> tuple[float, int]:
    log_p, nll = surprise(logits, labels)
    losses = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(axis=-1)
    return float(losses.sum() / np.log(2)), len(nll)


WRONG = {
    "masked_labels": {"loss-prompt-not-masked": everything_learned},
    "shifted": {"loss-labels-not-shifted": labels_as_they_are, "loss-labels-shifted-twice": two_ahead},
    "cross_entropy": {
        "loss-smoothing-missing": not_smoothed,
        "loss-smoothing-over-ignored": all_rows_smoothed,
        "loss-smoothing-added": smoothing_on_top,
        "loss-divided-by-all-tokens": every_row_counted,
        "loss-in-bits": log_to_base_two,
    },
}
UNTYPED: dict[str, str] = {}
