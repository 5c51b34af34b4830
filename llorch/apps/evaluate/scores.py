"""Scores of single tokens from their logits, and of a text from its tokens' scores, with standard errors.

    loss      = -log q[target]
    KL(p, q)  = sum of p * (log p - log q)        p: reference, q: model, both softmax; natural logarithm

All values are computed in float64 from the models' logits, so equal rows give a divergence of exactly 0. The rounding
error is about 1e-15, so a divergence of this size may be negative.

Standard errors treat the tokens as independent, as llama.cpp does. The standard errors of the perplexity ratio and
difference come from per-token differences of the two losses: most of the variance is common to both and cancels.

Source: llama.cpp tools/perplexity/perplexity.cpp, `kl_divergence` (reported values, propagation of errors).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from llorch.ops.cross_entropy import log_softmax

Logits = Float[np.ndarray, "rows vocab"]
Targets = Int[np.ndarray, " rows"]
PerToken = Float64[np.ndarray, " rows"]

_BLOCK = 1 << 19  # logits converted to float64 at once: 4 MB, which a CPU cache holds


@dataclass(frozen=True)
class PairScores:
    """Scores of two models on the same tokens, one number per token."""

    reference_loss: PerToken  # nats
    loss: PerToken  # nats
    kl: PerToken  # nats
    same_top: Bool[np.ndarray, " rows"]  # True if both models have the same most likely token

    @classmethod
    def join(cls, parts: "Sequence[PairScores]") -> "PairScores":
        """Concatenate the tokens of several parts."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def losses(logits: Logits, targets: Targets) -> PerToken:
    """Compute the negative log probability of each row's target, in nats."""
    return np.concatenate(
        [_loss(log_softmax(logits[rows].astype(np.float64)), targets[rows]) for rows in _row_slices(logits)]
    )


def compare_rows(reference: Logits, logits: Logits, targets: Targets) -> PairScores:
    """Compare two models on the same tokens; if several tokens are the most likely, the lowest id is the top one."""
    return PairScores.join([_compare(reference[rows], logits[rows], targets[rows]) for rows in _row_slices(logits)])


def _compare(reference: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> PairScores:
    log_p, log_q = (log_softmax(rows.astype(np.float64)) for rows in (reference, logits))
    return PairScores(
        reference_loss=_loss(log_p, targets),
        loss=_loss(log_q, targets),
        kl=np.sum(np.exp(log_p) * (log_p - log_q), axis=-1),
        same_top=reference.argmax(axis=-1) == logits.argmax(axis=-1),
    )


def _loss(log_probs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return -log_probs[np.arange(len(targets)), targets]


def _row_slices(logits: np.ndarray) -> Iterator[slice]:
    """Split the rows into slices so that float64 copies stay small for every vocabulary."""
    step = max(1, _BLOCK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


@dataclass(frozen=True)
class Estimate:
    """Mean over the tokens, or a function of means, with its standard error."""

    value: float
    error: float  # one standard error; NaN for a single token


@dataclass(frozen=True)
class Prediction:
    """Quality of one model's predictions on a text."""

    n_scored: int  # tokens
    loss: Estimate  # mean of -log q[target], nats
    perplexity: Estimate  # exp(loss)


@dataclass(frozen=True)
class ModelDifference:
    """Difference between a model and a reference on a text."""

    n_scored: int  # tokens
    reference_perplexity: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate  # model / reference
    perplexity_log_ratio: Estimate  # log of the ratio, the difference of the losses in nats
    perplexity_difference: Estimate  # model - reference
    kl: Estimate  # mean of KL(reference, model), nats
    kl_quantiles: dict[str, float]  # by percentage of the tokens: median, 90 %, ..., maximum
    same_top: Estimate  # share of tokens whose most likely token is the same, 0 to 1
    p_rms: Estimate  # root mean square of q[target] - p[target], 0 to 1
    p_mean: Estimate  # mean of q[target] - p[target]
    p_max: float  # largest |q[target] - p[target]|


QUANTILES = {"median": 0.5, "90%": 0.9, "95%": 0.95, "99%": 0.99, "99.9%": 0.999, "maximum": 1.0}


def mean(values: PerToken) -> Estimate:
    """Compute the mean and its standard error, which is NaN for a single value."""
    n = len(values)
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(n - 1)) if n > 1 else math.nan)


def summarise_losses(loss: PerToken) -> Prediction:
    """Compute loss and perplexity of one model from the loss of each scored token, in nats."""
    average = mean(loss)
    return Prediction(len(loss), average, _exp(average))


def compare_models(scores: PairScores) -> ModelDifference:
    """Compute all differences between a model and a reference."""
    reference, model = (summarise_losses(loss).perplexity for loss in (scores.reference_loss, scores.loss))
    log_ratio = mean(scores.loss - scores.reference_loss)
    change = np.exp(-scores.loss) - np.exp(-scores.reference_loss)
    return ModelDifference(
        n_scored=len(scores.loss),
        reference_perplexity=reference,
        perplexity=model,
        perplexity_ratio=_exp(log_ratio),
        perplexity_log_ratio=log_ratio,
        perplexity_difference=_difference(scores, reference.value, model.value),
        kl=mean(scores.kl),
        kl_quantiles={name: float(np.quantile(scores.kl, share)) for name, share in QUANTILES.items()},
        same_top=mean(scores.same_top.astype(np.float64)),
        p_rms=_root_mean_square(change),
        p_mean=mean(change),
        p_max=float(np.abs(change).max()),
    )


def _exp(estimate: Estimate) -> Estimate:
    """Return exp of an estimate, with its error propagated to first order."""
    with np.errstate(over="ignore"):  # the perplexity of a broken model may be infinite
        value = float(np.exp(estimate.value))
    return Estimate(value, value * estimate.error)


def _difference(scores: PairScores, reference_perplexity: float, model_perplexity: float) -> Estimate:
    """Compute the perplexity difference; its error is first order, d perplexity / d loss = perplexity."""
    changes = model_perplexity * scores.loss - reference_perplexity * scores.reference_loss
    return Estimate(model_perplexity - reference_perplexity, mean(changes).error)


def _root_mean_square(values: PerToken) -> Estimate:
    """Compute the root mean square, with its standard error to first order; the error is 0 if all values are 0.

    The error of a single value is NaN, as in `mean`.
    """
    square = mean(values * values)
    root = math.sqrt(square.value)
    return Estimate(root, square.error / (2 * root) if root else square.error)
