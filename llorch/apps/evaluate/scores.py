"""Figures of single tokens from rows of logits, and of a whole text from those, each with its standard error.

    loss      = -log q[right token]
    KL(p, q)  = sum of p * (log p - log q)        p of the reference, q of the model, natural logarithm

All in float64 on the logits as they come: equal rows give a divergence of exactly 0. Rounding leaves an error of
about 1e-15 either way, so that a divergence below that may come out negative.

Errors take the tokens for independent draws, as llama.cpp does. Those of ratios and differences come from the
differences token by token: both models read the same text, so most of the spread is common to them and cancels.

Source: llama.cpp tools/perplexity/perplexity.cpp, `kl_divergence`, for what is reported and how errors propagate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

Logits = Float[np.ndarray, "rows vocab"]
Targets = Int[np.ndarray, " rows"]
PerToken = Float64[np.ndarray, " rows"]

_BLOCK = 1 << 19  # logits widened to float64 in one go: 4 MB, near the processor


@dataclass(frozen=True)
class PairScores:
    """Predictions of two models for the same tokens, one number per token."""

    reference_loss: Float64[np.ndarray, " rows"]  # nats
    loss: Float64[np.ndarray, " rows"]  # nats
    kl: Float64[np.ndarray, " rows"]  # nats
    same_top: Bool[np.ndarray, " rows"]  # the most likely token is the same

    @classmethod
    def join(cls, parts: "Sequence[PairScores]") -> "PairScores":
        """Put the tokens of several parts in one row."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def log_softmax(logits: Logits) -> Float64[np.ndarray, "rows vocab"]:
    """Compute log probabilities; large logits do not overflow, since the best of each row is subtracted first."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def losses(logits: Logits, targets: Targets) -> PerToken:
    """Compute minus the log probability of the right token of each row, in nats."""
    return np.concatenate([_loss(log_softmax(logits[rows]), targets[rows]) for rows in _row_slices(logits)])


def compare_rows(reference: Logits, logits: Logits, targets: Targets) -> PairScores:
    """Compare two models on the same tokens; of equally likely ones that with the lowest id counts as the best."""
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
    """Cut rows so that float64 copies stay small however large the vocabulary is."""
    step = max(1, _BLOCK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


Values = Float64[np.ndarray, " tokens"]


@dataclass(frozen=True)
class Estimate:
    """A mean, or what follows from one."""

    value: float
    error: float  # one standard error; NaN from a single token


@dataclass(frozen=True)
class Prediction:
    """Quality of one model's predictions on a text."""

    n_scored: int  # tokens
    loss: Estimate  # mean of -log p(right token), nats
    perplexity: Estimate  # exp(loss)


@dataclass(frozen=True)
class ModelDifference:
    """Difference between a model and a reference on a text."""

    n_scored: int  # tokens
    reference_perplexity: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate  # model / reference
    perplexity_log_ratio: Estimate  # its logarithm, the difference of the losses in nats
    perplexity_difference: Estimate  # model - reference
    kl: Estimate  # mean of KL(reference, model), nats
    kl_quantiles: dict[str, float]  # by percentage of the tokens: median, 90 %, ..., maximum
    same_top: Estimate  # share of tokens whose most likely token is the same, 0 to 1
    p_rms: Estimate  # root mean square of p_model - p_reference of the right token, 0 to 1
    p_mean: Estimate  # mean of the same
    p_max: float  # largest size of the same


QUANTILES = {"median": 0.5, "90%": 0.9, "95%": 0.95, "99%": 0.99, "99.9%": 0.999, "maximum": 1.0}


def mean(values: Values) -> Estimate:
    """Compute the mean and its standard error, which is NaN for a single value."""
    n = len(values)
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(n - 1)) if n > 1 else math.nan)


def perplexity(loss: Values) -> Prediction:
    """Judge one model by the loss of each scored token, in nats."""
    average = mean(loss)
    return Prediction(len(loss), average, _exp(average))


def compare_models(scores: PairScores) -> ModelDifference:
    """Judge a model against a reference."""
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


def _exp(of: Estimate) -> Estimate:
    """Return e to the power of an estimate, with its error carried over to first order."""
    with np.errstate(over="ignore"):  # the perplexity of a broken model may be infinite
        value = float(np.exp(of.value))
    return Estimate(value, value * of.error)


def _difference(scores: PairScores, reference: float, model: float) -> Estimate:
    """Estimate the error to first order: the derivative of a perplexity by its mean loss is the perplexity."""
    return Estimate(model - reference, mean(model * scores.loss - reference * scores.reference_loss).error)


def _root_mean_square(values: Values) -> Estimate:
    """Return the root of the mean square, with its standard error to first order."""
    square = mean(values * values)
    root = math.sqrt(square.value)
    return Estimate(root, square.error / (2 * root) if root else square.error)
