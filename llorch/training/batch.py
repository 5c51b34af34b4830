"""Examples as ids and labels, and batches of rows with one or more examples each.

The label of a token in the loss is its own id; a masked label is `IGNORED`. The loss shifts labels: token t - 1
predicts the label of token t, so the first label of a document is never in the loss.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from jaxtyping import Int64

from llorch.ops.cross_entropy import IGNORED
from llorch.runtime.errors import UserError

PADDING = -1  # position and document number of padding


@dataclass(frozen=True)
class Example:
    """One tokenized example."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]  # one per id: the id, or `IGNORED`
    source: str = ""  # file and line, `train.jsonl:17`

    @property
    def n_trained(self) -> int:
        """Number of tokens in the loss, without the first token, which no token predicts."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass: packed documents one after the other, then padding."""

    ids: Int64[np.ndarray, "batch seq"]  # 0 for padding
    labels: Int64[np.ndarray, "batch seq"]  # ids in the loss, else `IGNORED`, as at the start of a document
    positions: Int64[np.ndarray, "batch seq"]  # from 0 on in each document, `PADDING` for padding
    documents: Int64[np.ndarray, "batch seq"]  # document number in the row, or `PADDING`; masks attention
    samples: Int64[np.ndarray, " batch"]  # each row's number in the data set: dropout derives from it, not the batch

    @property
    def n_trained(self) -> int:
        """Number of tokens in the loss; a step's loss is divided by the sum of this number over its batches."""
        return int((self.labels != IGNORED).sum())

    def each_document(self) -> Iterator[tuple[Int64[np.ndarray, " seq"], Int64[np.ndarray, " seq"]]]:
        """Yield the ids and labels of every document, row by row, for code without attention masks."""
        for row in range(len(self.ids)):
            for document in range(int(self.documents[row].max()) + 1):
                is_in_document = self.documents[row] == document
                yield self.ids[row, is_in_document], self.labels[row, is_in_document]


def trained_tokens(batches: Sequence[Batch]) -> int:
    """Count the tokens in the loss of one optimizer step, the loss's divisor; UserError if there are none."""
    n_trained = sum(batch.n_trained for batch in batches)
    if n_trained == 0:
        n_tokens = sum(int((batch.positions != PADDING).sum()) for batch in batches)
        raise UserError(f"train: expected a token to learn in every step, got {n_tokens} tokens, all ignored (-100)")
    return n_trained


class Examples(Sequence[Example]):
    """Examples stored in 5 bytes per token and built on access; an `Example` needs about 40 bytes per token."""

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        """Store examples; every label must be the id or `IGNORED`, and ids must fit 32 bits."""
        parts = [(np.array(e.ids, np.int32), np.array(e.labels) != IGNORED, e.source) for e in examples]
        self._ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _, _ in parts)])
        self._in_loss = np.concatenate([np.zeros(0, bool), *(in_loss for _, in_loss, _ in parts)])
        self._ends = np.cumsum([0, *(len(ids) for ids, _, _ in parts)])
        self._sources = [source for _, _, source in parts]

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]  # checks bounds and resolves negative indices
        span = slice(self._ends[i], self._ends[i + 1])
        ids, in_loss = self._ids[span], self._in_loss[span]
        return Example(tuple(ids.tolist()), tuple(np.where(in_loss, ids, IGNORED).tolist()), self._sources[i])

    @property
    def lengths(self) -> Int64[np.ndarray, " examples"]:
        """Number of tokens of each example."""
        return np.diff(self._ends)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all examples."""
        return len(self._ids)

    @property
    def n_trained(self) -> int:
        """Number of tokens in the loss, without the first token of each example, which no token predicts."""
        firsts = self._in_loss[self._ends[:-1]].sum() if len(self) else 0
        return int(self._in_loss.sum() - firsts)

    def ids_in_loss(self, ids: Collection[int]) -> list[int]:
        """Select the ids that are in the loss of any example, sorted."""
        return sorted({*np.unique(self._ids[self._in_loss]).tolist()} & {*ids})

    def content(self) -> Iterable[bytes]:
        """Yield the bytes that identify a data set: ids, tokens in the loss, ends of examples; no sources."""
        yield self._ids.astype("<i4").tobytes()
        yield self._in_loss.tobytes()
        yield self._ends.astype("<i8").tobytes()
