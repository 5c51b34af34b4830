"""Known mistakes in labels, token losses and the loss of a step: each maps a right function to a wrong one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function, Replacement
from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.ops.cross_entropy import log_softmax
from llorch.training.batch import IGNORED, Batch

Split = Callable[[Sequence[Batch]], Sequence[Sequence[Batch]]]  # batches of a step to shares, see `divided_by_share`
LOSS = "llorch.ops.cross_entropy.cross_entropy"
BACK = "llorch.ops.cross_entropy.cross_entropy_backward"
DOCUMENTS = "llorch.training.batch.Batch.each_document"
STEP = "llorch.training.numpy_step.loss_and_gradients"  # loss and gradients of all micro-batches of a step


def not_shifted(right: Function) -> Function:
    """Use each token as the label of its own row."""
    return lambda labels: labels


def shifted_twice(right: Function) -> Function:
    """Use the token after the next one as the label."""
    return lambda labels: right(right(labels))


def prompt_in_loss(right: Function) -> Function:
    """Use every token except a document's first as a label."""
    return lambda batch: ((ids, np.concatenate([[IGNORED], ids[1:]])) for ids, _ in right(batch))


def set_smoothing(value: float) -> Replacement:
    """Make the replacement that uses another label smoothing, in the loss or in its gradient."""
    return lambda right: lambda logits, labels, **kw: right(logits, labels, **kw | {"label_smoothing": value})


def smoothing_over_masked(right: Function) -> Function:
    """Sum the uniform part of label smoothing over masked rows too."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float) -> tuple[float, int]:
        total, n_trained = right(logits, labels, label_smoothing=label_smoothing)
        log_p = log_softmax(logits[labels == IGNORED].astype(np.float64))
        return total - label_smoothing * float(log_p.mean(-1).sum()), n_trained

    return wrong


def smoothing_added(right: Function) -> Function:
    """Add e times the uniform part to the cross entropy without multiplying the latter by 1 - e (e: smoothing)."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float) -> tuple[float, int]:
        total, n_trained = right(logits, labels, label_smoothing=label_smoothing)
        return total + label_smoothing * right(logits, labels, label_smoothing=0.0)[0], n_trained

    return wrong


def smoothing_over_masked_back(right: Function) -> Function:
    """Compute the gradient of `smoothing_over_masked`: masked rows move to the uniform distribution."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float, n_trained: int) -> np.ndarray:
        kw = {"n_trained": n_trained, "label_smoothing": 1.0}
        ids = np.where(labels == IGNORED, 0, IGNORED)  # smoothing is 1: any token id has the same gradient
        d_masked = right(logits, ids, **kw) * label_smoothing if 0 in ids else 0  # `right` raises without a label
        return right(logits, labels, label_smoothing=label_smoothing, n_trained=n_trained) + d_masked

    return wrong


def smoothing_added_back(right: Function) -> Function:
    """Compute the gradient of `smoothing_added`."""

    def wrong(logits: np.ndarray, labels: np.ndarray, *, label_smoothing: float, n_trained: int) -> np.ndarray:
        d_nll = right(logits, labels, label_smoothing=0.0, n_trained=n_trained)
        return right(logits, labels, label_smoothing=label_smoothing, n_trained=n_trained) + label_smoothing * d_nll

    return wrong


def divided_by_all(right: Function) -> Function:
    """Count all tokens, masked ones too, as tokens in the loss."""
    return lambda logits, labels, **kw: (right(logits, labels, **kw)[0], len(labels))


def in_bits(right: Function) -> Function:
    """Use the logarithm to the base 2."""

    def wrong(logits: np.ndarray, labels: np.ndarray, **kw: float) -> tuple[float, int]:
        total, n_trained = right(logits, labels, **kw)
        return total / float(np.log(2)), n_trained

    return wrong


def in_bits_back(right: Function) -> Function:
    """Compute the gradient of `in_bits`."""
    return lambda logits, labels, **kw: right(logits, labels, **kw) / logits.dtype.type(np.log(2))


def divided_by_share(
    split: Split = lambda batches: [[batch] for batch in batches], *, averaged: bool = True
) -> Replacement:
    """Make the replacement that divides each share of a step by its own tokens, and averages or sums the means.

    A share is a group of batches with a divisor of its own, such as the rows of one rank; by default, each batch.
    """

    def make(right: Function) -> Function:
        def wrong(weights: Weights, adapter: Adapter, batches: Sequence[Batch], **kw: object) -> tuple[float, Mapping]:
            parts = [right(weights, adapter, share, **kw) for share in split(batches)]
            n = len(parts) if averaged else 1
            grads = {name: sum(part[1][name] for part in parts) / n for name in parts[0][1]}
            return sum(part[0] for part in parts) / n, grads

        return wrong

    return make


def last_batch_only(right: Function) -> Function:
    """Use only the last batch, as if gradients were cleared before each batch."""
    return lambda weights, adapter, batches, **kw: right(weights, adapter, batches[-1:], **kw)


LOSSES: tuple[Mistake[Any], ...] = (  # `along`: autograd derives the gradient from the wrong loss
    training_mistake("loss-labels-not-shifted", ("token_losses", "loss"), "llorch.ops.cross_entropy.shifted",
        not_shifted,
        "Each row of logits was compared with its own token; it predicts the next token."),
    training_mistake("loss-labels-shifted-twice", ("token_losses", "loss"), "llorch.ops.cross_entropy.shifted",
        shifted_twice,
        "Labels that were shifted already were shifted again by the loss; shift them in one place."),
    training_mistake("loss-prompt-not-masked", ("token_losses", "loss"), DOCUMENTS, prompt_in_loss,
        "The prompt was learned too; only labels other than -100 count."),
    training_mistake("loss-smoothing-missing", ("token_losses", "loss"), LOSS, set_smoothing(0.0),
        "Label smoothing has no effect on the loss.", along=(BACK, set_smoothing(0.0)), cases=("smoothed",)),
    training_mistake("loss-smoothing-over-ignored", ("loss",), LOSS, smoothing_over_masked,
        "The uniform part of label smoothing was summed over positions that are not learned; it belongs to those that "
        "are.", along=(BACK, smoothing_over_masked_back), cases=("smoothed",)),
    training_mistake("loss-smoothing-added", ("token_losses", "loss"), LOSS, smoothing_added,
        "The uniform part was added to the whole loss of the label; that loss has the weight 1 - e.",
        along=(BACK, smoothing_added_back), cases=("smoothed",)),
    training_mistake("loss-divided-by-all-tokens", ("loss",), LOSS, divided_by_all,
        "The sum was divided by all tokens; divide it by the learned tokens."),
    training_mistake("loss-in-bits", ("token_losses", "loss"), LOSS, in_bits,
        "The logarithm is to the base of 2; losses are in nats.", along=(BACK, in_bits_back)),
    training_mistake("accumulation-mean-of-means", ("loss_curve",), STEP, divided_by_share(),
        "Each micro-batch was divided by its own tokens and the means were averaged; the sum over the whole step is "
        "divided once, by all its learned tokens.", cases=("curve",)),
    training_mistake("accumulation-not-divided", ("loss_curve",), STEP, divided_by_share(averaged=False),
        "The means of the micro-batches were added up; the loss grows with their number.", cases=("curve",)),
    training_mistake("accumulation-last-batch-only", ("loss_curve",), STEP, last_batch_only,
        "Only the last micro-batch of a step counts: gradients were cleared before each of them.", cases=("curve",)),
)  # fmt: skip
