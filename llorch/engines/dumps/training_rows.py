"""Rows of tokens in a training dump: micro-batches as documents, and what was computed of their tokens."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from llorch.engines.dumps.raw import RawArray
from llorch.runtime.errors import UserError
from llorch.training.batch import IGNORED, PADDING, Batch


def documents_of(
    input_ids: np.ndarray, labels: np.ndarray | None = None, attention_mask: np.ndarray | None = None,
    position_ids: np.ndarray | None = None,
) -> tuple[Batch, int]:  # fmt: skip
    """Split rows into documents, without those that have nothing to learn; also return how many were left out."""
    held = np.ones(input_ids.shape, bool) if attention_mask is None else attention_mask != 0
    labels = np.where(held, input_ids if labels is None else labels, IGNORED)
    starts = held & (np.cumsum(held, axis=1) == 1)
    if position_ids is not None:
        starts |= held & (position_ids == 0)
    documents = np.where(held, np.cumsum(starts, axis=1) - 1, PADDING)
    labels = np.where(starts, IGNORED, labels)
    positions, n_left_out = np.full(input_ids.shape, PADDING), 0
    for row in range(len(input_ids)):
        kept = 0
        for document in range(int(documents[row].max()) + 1):
            own = documents[row] == document
            empty = not (labels[row, own] != IGNORED).any()
            n_left_out += empty
            documents[row, own], positions[row, own] = (PADDING, PADDING) if empty else (kept, np.arange(own.sum()))
            kept += not empty
    samples = np.arange(len(input_ids))
    return Batch(np.where(documents >= 0, input_ids, 0), labels, positions, documents, samples), n_left_out


def placed(name: str, arrays: Sequence[RawArray], batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Join the arrays of all micro-batches, one row per token of the documents, and mark the rows that are known."""
    place: Callable[[RawArray, Batch], tuple[np.ndarray, np.ndarray]] = _logits_rows if name == "logits" else _losses
    rows, known = zip(*(place(array, batch) for array, batch in zip(arrays, batches, strict=True)), strict=True)
    return np.concatenate(rows), np.concatenate(known)


def _logits_rows(array: RawArray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of all tokens but padding, and a mask that is True for each of them."""
    held, read = batch.documents >= 0, array.read().astype(np.float64)
    read = read[None] if read.ndim == 2 else read
    if read.shape[:-1] != held.shape:
        raise UserError(f"training dump: {array.name}: expected rows of {held.shape} tokens, got {array.shape}")
    return read[held], np.ones(int(held.sum()), bool)


def _losses(array: RawArray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return one loss for each token that is no padding, and a mask of those that the dump states."""
    held, read = batch.documents >= 0, array.read().astype(np.float64)
    n_rows, n_tokens = held.shape
    learned = np.append(batch.labels[:, 1:], np.full((n_rows, 1), IGNORED), axis=1) != IGNORED
    losses, known = np.zeros(held.shape), np.zeros(held.shape, bool)
    if read.size == learned.sum() and read.ndim == 1:
        losses[learned], known[learned] = read, True
    elif read.size in (held.size, n_rows * (n_tokens - 1)):
        width = read.size // n_rows
        losses[:, :width], known[:, :width] = read.reshape(n_rows, width), True
    else:
        raise UserError(
            f"training dump: {array.name}: expected losses for {held.shape} tokens, or for the {learned.sum()} learned "
            f"tokens only, got {array.shape}"
        )
    return losses[held], known[held]
