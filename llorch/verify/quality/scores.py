"""Figures of single tokens from rows of logits: loss of the right token, Kullback-Leibler divergence, same best token.

    loss      = -log q[right token]
    KL(p, q)  = sum of p * (log p - log q)        p of the reference, q of the model, natural logarithm

All in float64 on the logits as they come: equal rows give a divergence of exactly 0. Rounding leaves an error of
about 1e-15 either way, so that a divergence below that may come out negative.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

Logits = Float[np.ndarray, "rows vocab"]
Targets = Int[np.ndarray, " rows"]
PerToken = Float64[np.ndarray, " rows"]

_BLOCK = 1 << 19  # logits widened to float64 in one go: 4 MB, near the processor


@dataclass(frozen=True)
class PairScores:
    """What two models say of the same tokens, one number per token."""

    reference_loss: Float64[np.ndarray, " rows"]  # nats
    loss: Float64[np.ndarray, " rows"]  # nats
    kl: Float64[np.ndarray, " rows"]  # nats
    same_top: Bool[np.ndarray, " rows"]  # the most likely token is the same

    @classmethod
    def join(cls, parts: "Sequence[PairScores]") -> "PairScores":
        """Put the tokens of several parts in one row."""
        return cls(
            np.concatenate([part.reference_loss for part in parts]),
            np.concatenate([part.loss for part in parts]),
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.same_top for part in parts]),
        )


def log_softmax(logits: Logits) -> Float64[np.ndarray, "rows vocab"]:
    """Log probabilities; large logits do not overflow, since the best of each row is taken off first."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def losses(logits: Logits, targets: Targets) -> PerToken:
    """Minus the log probability of the right token of each row, in nats."""
    return np.concatenate([_loss(log_softmax(logits[rows]), targets[rows]) for rows in _blocks(logits)])


def compare_rows(reference: Logits, logits: Logits, targets: Targets) -> PairScores:
    """Compare two models on the same tokens; of equally likely ones that with the lowest id counts as the best."""
    return PairScores.join([_compare(reference[rows], logits[rows], targets[rows]) for rows in _blocks(logits)])


def _compare(reference: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> PairScores:
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    return PairScores(
        reference_loss=_loss(log_p, targets),
        loss=_loss(log_q, targets),
        kl=np.sum(np.exp(log_p) * (log_p - log_q), axis=-1),
        same_top=reference.argmax(axis=-1) == logits.argmax(axis=-1),
    )


def _loss(log_probs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return -log_probs[np.arange(len(targets)), targets]


def _blocks(logits: np.ndarray) -> Iterator[slice]:
    """Cut rows so that float64 copies stay small however large the vocabulary is."""
    step = max(1, _BLOCK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))
