"""Mistakes of checkpoints 16 and 19: which tokens are learned, what each costs, and what the sum is divided by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import ONE_STEP, Mistake
from llorch.training.batch import IGNORED, Batch

Function = Callable[..., Any]
LOSS = "llorch.ops.cross_entropy.cross_entropy"
BACK = "llorch.ops.cross_entropy.cross_entropy_backward"
DOCUMENTS = "llorch.training.batch.Batch.each_document"
STEP = "llorch.training.numpy_step.loss_and_gradients"


def not_shifted(right: Function) -> Function:
    """Judge every row by its own token."""
    return lambda labels: labels


def shifted_twice(right: Function) -> Function:
    """Judge every row by the token after the next."""
    return lambda labels: right(right(labels))


def prompt_learned(right: Function) -> Function:
    """Use all tokens as labels."""

    def wrong(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, _ in right(batch):
            yield ids, np.concatenate([[IGNORED], ids[1:]])

    return wrong


def smoothing_missing(right: Function) -> Function:
    """Leave out label smoothing."""
    return lambda logits, labels, **how: right(logits, labels, **how | {"label_smoothing": 0.0})


def smoothing_over_ignored(right: Function) -> Function:
    """Sum the uniform part of label smoothing over rows that are not learned too."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float) -> tuple[float, int]:
        total, n_trained = right(logits, labels, label_smoothing=label_smoothing)
        others = logits[labels == IGNORED].astype(np.float64)
        log_p = others - others.max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        return total - label_smoothing * float(log_p.mean(-1).sum()), n_trained

    return wrong


def smoothing_added(right: Function) -> Function:
    """Add eps times the uniform part to the whole cross entropy, without reducing the latter."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float) -> tuple[float, int]:
        total, n_trained = right(logits, labels, label_smoothing=label_smoothing)
        return total + label_smoothing * right(logits, labels, label_smoothing=0.0)[0], n_trained

    return wrong


def smoothing_over_ignored_back(right: Function) -> Function:
    """Compute the gradient of `smoothing_over_ignored`: rows that are not learned move to the uniform distribution."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float, n_trained: int) -> np.ndarray:
        how = {"n_trained": n_trained, "label_smoothing": 1.0}
        others = np.where(labels == IGNORED, 0, IGNORED)
        drawn = right(logits, others, **how) * label_smoothing if (others == 0).any() else 0
        return right(logits, labels, label_smoothing=label_smoothing, n_trained=n_trained) + drawn

    return wrong


def smoothing_added_back(right: Function) -> Function:
    """Compute the gradient of `smoothing_added`."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float, n_trained: int) -> np.ndarray:
        plain = right(logits, labels, label_smoothing=0.0, n_trained=n_trained)
        return right(logits, labels, label_smoothing=label_smoothing, n_trained=n_trained) + label_smoothing * plain

    return wrong


def in_bits_back(right: Function) -> Function:
    """Compute the gradient of `in_bits`."""
    return lambda logits, labels, **how: right(logits, labels, **how) / logits.dtype.type(np.log(2))


def divided_by_all(right: Function) -> Function:
    """Count every token, learned or not."""
    return lambda logits, labels, **how: (right(logits, labels, **how)[0], len(labels))


def in_bits(right: Function) -> Function:
    """Use the logarithm to the base of two."""

    def wrong(logits: np.ndarray, labels: np.ndarray, **how: float) -> tuple[float, int]:
        total, n_trained = right(logits, labels, **how)
        return total / float(np.log(2)), n_trained

    return wrong


def mean_of_means(right: Function) -> Function:
    """Divide each batch by its own tokens, and average the means."""

    def wrong(weights: Any, adapter: Any, batches: Sequence[Batch], **how: Any) -> tuple[float, Mapping]:
        parts = [right(weights, adapter, [batch], **how) for batch in batches]
        grads = {name: sum(part[1][name] for part in parts) / len(parts) for name in parts[0][1]}
        return sum(part[0] for part in parts) / len(parts), grads

    return wrong


def summed_means(right: Function) -> Function:
    """Add up the means of all batches."""

    def wrong(weights: Any, adapter: Any, batches: Sequence[Batch], **how: Any) -> tuple[float, Mapping]:
        parts = [right(weights, adapter, [batch], **how) for batch in batches]
        return sum(part[0] for part in parts), {name: sum(part[1][name] for part in parts) for name in parts[0][1]}

    return wrong


def last_batch_only(right: Function) -> Function:
    """Use only the last batch, as if the gradients were cleared before every batch."""
    return lambda weights, adapter, batches, **how: right(weights, adapter, batches[-1:], **how)


LOSSES: tuple[Mistake[Any], ...] = (
    Mistake(
        name="loss-labels-not-shifted", stages=("token_losses", "loss"), wrong=not_shifted,
        part="llorch.ops.cross_entropy.shifted",
        cases=ONE_STEP,
        diagnosis="Each row of logits was compared with its own token; it predicts the next token.",
    ),
    Mistake(
        name="loss-labels-shifted-twice", stages=("token_losses", "loss"), wrong=shifted_twice,
        part="llorch.ops.cross_entropy.shifted",
        cases=ONE_STEP,
        diagnosis="Labels that were shifted already were shifted again by the loss; shift them in one place.",
    ),
    Mistake(
        name="loss-prompt-not-masked", stages=("token_losses", "loss"), part=DOCUMENTS, wrong=prompt_learned,
        cases=ONE_STEP,
        diagnosis="The prompt was learned too; only labels other than -100 count.",
    ),
    Mistake(
        name="loss-smoothing-missing", stages=("token_losses", "loss"), part=LOSS, wrong=smoothing_missing,
        along=(BACK, smoothing_missing),
        cases=("smoothed",),
        diagnosis="Label smoothing has no effect on the loss.",
    ),
    Mistake(
        name="loss-smoothing-over-ignored", stages=("loss",), part=LOSS, wrong=smoothing_over_ignored,
        along=(BACK, smoothing_over_ignored_back),
        cases=("smoothed",),
        diagnosis="The uniform part of label smoothing was summed over positions that are not learned; it belongs to "
        "those that are.",
    ),
    Mistake(
        name="loss-smoothing-added", stages=("token_losses", "loss"), part=LOSS, wrong=smoothing_added,
        along=(BACK, smoothing_added_back),
        cases=("smoothed",),
        diagnosis="The uniform part was added to the whole loss of the label; that loss has the weight 1 - e.",
    ),
    Mistake(
        name="loss-divided-by-all-tokens", stages=("loss",), part=LOSS, wrong=divided_by_all,
        cases=ONE_STEP,
        diagnosis="The sum was divided by all tokens; divide it by the learned tokens.",
    ),
    Mistake(
        name="loss-in-bits", stages=("token_losses", "loss"), part=LOSS, wrong=in_bits,
        along=(BACK, in_bits_back),
        cases=ONE_STEP,
        diagnosis="The logarithm is to the base of 2; losses are in nats.",
    ),
    Mistake(
        name="accumulation-mean-of-means", stages=("loss_curve",), part=STEP, wrong=mean_of_means, cases=("curve",),
        diagnosis="Each micro-batch was divided by its own tokens and the means were averaged; the sum over the whole "
        "step is divided once, by all its learned tokens.",
    ),
    Mistake(
        name="accumulation-not-divided", stages=("loss_curve",), part=STEP, wrong=summed_means, cases=("curve",),
        diagnosis="The means of the micro-batches were added up; the loss grows with their number.",
    ),
    Mistake(
        name="accumulation-last-batch-only", stages=("loss_curve",), part=STEP, wrong=last_batch_only,
        cases=("curve",),
        diagnosis="Only the last micro-batch of a step counts: gradients were cleared before each of them.",
    ),
)  # fmt: skip
