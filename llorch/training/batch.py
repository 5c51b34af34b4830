"""What the model is trained on: examples as ids and labels, and batches of rows that hold one or more of them.

A label is the id of its own token where that token is to be learned, else `IGNORED`; the loss does the shift, so the
label of token t is predicted from token t - 1, and the first label of every document is never learned.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from jaxtyping import Int64

from llorch.ops.cross_entropy import IGNORED
from llorch.runtime.errors import UserError

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
    samples: Int64[np.ndarray, " batch"]  # numbers of the rows in the data, whatever stands beside them

    @property
    def n_trained(self) -> int:
        """Tokens that are learned; what the loss of a step is divided by, summed over its batches."""
        return int((self.labels != IGNORED).sum())

    def each_document(self) -> Iterator[tuple[Int64[np.ndarray, " seq"], Int64[np.ndarray, " seq"]]]:
        """Yield the ids and labels of every document, row by row, for a path without masks."""
        for row in range(len(self.ids)):
            for document in range(int(self.documents[row].max()) + 1):
                own = self.documents[row] == document
                yield self.ids[row, own], self.labels[row, own]


def trained_tokens(batches: Sequence[Batch]) -> int:
    """Count the tokens that one optimizer step learns, by which its loss is divided; ValueError if there are none."""
    n_trained = sum(batch.n_trained for batch in batches)
    if n_trained == 0:
        n_tokens = sum(int((batch.positions != PADDING).sum()) for batch in batches)
        raise UserError(f"train: expected a token to learn in every step, got {n_tokens} tokens, all ignored (-100)")
    return n_trained


class Examples(Sequence[Example]):
    """Examples that are made when asked for: 5 bytes a token, where an `Example` of its own needs about 40."""

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        """Store examples; every label is the id itself or `IGNORED`, ids fit 32 bits."""
        parts = [(np.array(one.ids, np.int32), np.array(one.labels) != IGNORED, one.source) for one in examples]
        self._ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _, _ in parts)])
        self._learned = np.concatenate([np.zeros(0, bool), *(learned for _, learned, _ in parts)])
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
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # refuses what is outside, counts negative ones from the end
        span = slice(self._ends[place], self._ends[place + 1])
        ids, learned = self._ids[span], self._learned[span]
        return Example(tuple(ids.tolist()), tuple(np.where(learned, ids, IGNORED).tolist()), self._sources[place])

    @property
    def lengths(self) -> Int64[np.ndarray, " examples"]:
        """Tokens of each example."""
        return np.diff(self._ends)

    @property
    def n_tokens(self) -> int:
        """Tokens of all examples."""
        return len(self._ids)

    @property
    def n_trained(self) -> int:
        """Tokens that are learned; nothing predicts the first one of an example."""
        firsts = self._learned[self._ends[:-1]].sum() if len(self) else 0
        return int(self._learned.sum() - firsts)

    def trained_among(self, ids: Collection[int]) -> list[int]:
        """Find which of some ids are learned anywhere."""
        return sorted({*np.unique(self._ids[self._learned]).tolist()} & {*ids})

    def content(self) -> Iterable[bytes]:
        """Yield what tells one data set from another: ids, learned tokens, ends of examples; no sources."""
        yield self._ids.astype("<i4").tobytes()
        yield self._learned.tobytes()
        yield self._ends.astype("<i8").tobytes()
