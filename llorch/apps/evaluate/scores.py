"""Scores of single tokens from their logits, and of a text from its tokens' scores, with standard errors.

    loss      = -log q[target]
    KL(p, q)  = sum of p * (log p - log q)        p: reference, q: model, both softmax; natural logarithm

All values are computed in float64 from the models' logits, so equal rows give a divergence of exactly 0. The rounding
error is about 1e-15, so a divergence of this size may be negative.

Standard errors treat the tokens as independent, as llama.cpp does. The errors of ratios and differences use the
difference of each token: both models read the same text, so most of the variance is common and cancels.

Source: llama.cpp tools/perplexity/perplexity.cpp, `kl_divergence` (reported values, propagation of errors).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

Logits = Float[np.ndarray, "rows vocab"]
Targets = Int[np.ndarray, " rows"]
PerToken = Float64[np.ndarray, " rows"]

_BLOCK = 1 << 19  # logits converted to float64 at once: 4 MB, which a CPU cache holds


@dataclass(frozen=True)
class PairScores:
    """Scores of two models on the same tokens, one number per token."""

    reference_loss: Float64[np.ndarray, " rows"]  # nats
    loss: Float64[np.ndarray, " rows"]  # nats
    kl: Float64[np.ndarray, " rows"]  # nats
    same_top: Bool[np.ndarray, " rows"]  # True if both models have the same most likely token

    @classmethod
    def join(cls, parts: "Sequence[PairScores]") -> "PairScores":
        """Concatenate the tokens of several parts."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def log_softmax(logits: Logits) -> Float64[np.ndarray, "rows vocab"]:
    """Compute log probabilities; the largest logit of each row is subtracted first, so that exp does not overflow."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def losses(logits: Logits, targets: Targets) -> PerToken:
    """Compute the negative log probability of each row's target, in nats."""
    return np.concatenate([_loss(log_softmax(logits[rows]), targets[rows]) for rows in _row_slices(logits)])


def compare_rows(reference: Logits, logits: Logits, targets: Targets) -> PairScores:
    """Compare two models on the same tokens; if several tokens are the most likely, the lowest id is the top one."""
    return PairScores.join([_compare(reference[rows], logits[rows], targets[rows]) for rows in _row_slices(logits)])


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


def _row_slices(logits: np.ndarray) -> Iterator[slice]:
    """Split the rows so that float64 copies stay small for every vocabulary."""
    step = max(1, _BLOCK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


Values = Float64[np.ndarray, " tokens"]


@dataclass(frozen=True)
class Estimate:
    """Mean over the tokens, or a function of means, with its standard error."""

    value: float
    error: float  # one standard error; NaN for a single token


@dataclass(frozen=True)
class Prediction:
    """Quality of one model's predictions on a text."""

    n_scored: int  # tokens
    loss: Estimate  # mean of -log p(target), nats
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
    p_rms: Estimate  # root mean square of p_model(target) - p_reference(target), 0 to 1
    p_mean: Estimate  # mean of p_model(target) - p_reference(target)
    p_max: float  # largest absolute difference


QUANTILES = {"median": 0.5, "90%": 0.9, "95%": 0.95, "99%": 0.99, "99.9%": 0.999, "maximum": 1.0}


def mean(values: Values) -> Estimate:
    """Compute the mean and its standard error, which is NaN for a single value."""
    n = len(values)
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(n - 1)) if n > 1 else math.nan)


def perplexity(loss: Values) -> Prediction:
    """Compute loss and perplexity of one model from the loss of each scored token, in nats."""
    average = mean(loss)
    return Prediction(len(loss), average, _exp(average))


def compare_models(scores: PairScores) -> ModelDifference:
    """Compute all differences between a model and a reference."""
    reference, model = perplexity(scores.reference_loss).perplexity, perplexity(scores.loss).perplexity
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


def _difference(scores: PairScores, reference: float, model: float) -> Estimate:
    """Compute the perplexity difference; its error is first order, d perplexity / d loss = perplexity."""
    return Estimate(model - reference, mean(model * scores.loss - reference * scores.reference_loss).error)


def _root_mean_square(values: Values) -> Estimate:
    """Compute the root mean square, with its standard error to first order; for all zeros that of the squares, 0."""
    square = mean(values * values)
    root = math.sqrt(square.value)
    return Estimate(root, square.error / (2 * root) if root else square.error)
