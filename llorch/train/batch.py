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
    """One tokenized example.

    Attributes:
        ids: Its tokens.
        labels: As many; the id again, or `IGNORED`.
        source: Where it came from, `train.jsonl:17`.
    """

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    source: str = ""

    @property
    def n_trained(self) -> int:
        """Tokens that are learned: not the first one, which nothing predicts."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass; padding stands at the end of a row and packed documents one after the other.

    Attributes:
        ids: Token ids; 0 where there is padding.
        labels: Ids that are learned, `IGNORED` elsewhere and at the first token of every document.
        positions: 0 and up inside each document, `PADDING` where there is none.
        documents: Number of the document inside its row, `PADDING` where there is none: tokens see their own only.
    """

    ids: Int64[np.ndarray, "batch seq"]
    labels: Int64[np.ndarray, "batch seq"]
    positions: Int64[np.ndarray, "batch seq"]
    documents: Int64[np.ndarray, "batch seq"]

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
    """Count what the loss of one optimizer step is divided by.

    Args:
        batches: All of the step.

    Returns:
        Tokens that are learned, at least 1.

    Raises:
        ValueError: There is none.
    """
    n_trained = sum(batch.n_trained for batch in batches)
    if n_trained == 0:
        n_tokens = sum(int((batch.positions != PADDING).sum()) for batch in batches)
        raise ValueError(f"train: expected a token to learn in every step, got {n_tokens} tokens that are all ignored")
    return n_trained
