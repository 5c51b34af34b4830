"""What the model is trained on: examples as ids and labels, and batches of rows that hold one or more of them.

A label is the id of its own token where that token is to be learned, else `IGNORED`; the loss does the shift, so the
label of token t is predicted from token t - 1, and the first label of every document is never learned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from llorch.ops.cross_entropy import IGNORED

PADDING = -1  # position and document of a slot without a token


@dataclass(frozen=True)
class Example:
    """One tokenized example."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]  # as many; the id again, or `IGNORED`
    source: str = ""  # where it came from, `train.jsonl:17`

    @property
    def n_trained(self) -> int:
        """Tokens that are learned: not the first one, which nothing predicts."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass; padding stands at the end of a row and packed documents one after the other."""

    ids: Int64[np.ndarray, "batch seq"]  # 0 where there is padding
    labels: Int64[np.ndarray, "batch seq"]  # ids that are learned, else `IGNORED`, as at the start of a document
    positions: Int64[np.ndarray, "batch seq"]  # 0 and up inside each document, `PADDING` where there is none
    documents: Int64[np.ndarray, "batch seq"]  # number inside its row, or `PADDING`: tokens see their own only

    @property
    def n_trained(self) -> int:
        """Tokens that are learned; what the loss of a step is divided by, summed over its batches."""
        return int((self.labels != IGNORED).sum())

    def each_document(self) -> Iterator[tuple[Int64[np.ndarray, " seq"], Int64[np.ndarray, " seq"]]]:
        """Ids and labels of every document, row by row: what a path without masks runs one after the other."""
        for row in range(len(self.ids)):
            for document in range(int(self.documents[row].max()) + 1):
                own = self.documents[row] == document
                yield self.ids[row, own], self.labels[row, own]


def trained_tokens(batches: Sequence[Batch]) -> int:
    """Tokens that one optimizer step learns, by which its loss is divided; ValueError where there is none."""
    n_trained = sum(batch.n_trained for batch in batches)
    if n_trained == 0:
        n_tokens = sum(int((batch.positions != PADDING).sum()) for batch in batches)
        raise ValueError(f"train: expected a token to learn in every step, got {n_tokens} tokens that are all ignored")
    return n_trained
