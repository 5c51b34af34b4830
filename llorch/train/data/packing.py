"""Rows of several examples, and the arrays of a batch of rows.

Best-fit decreasing: examples from the longest to the shortest, each into the row with the least room that still takes
it. Inside a row every example is a document of its own: positions start at 0 again, and no token sees another document.

Source: Johnson 1974, "Fast algorithms for bin packing"; the order that TRL's `packing_strategy="bfd"` has.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from llorch.train.batch import IGNORED, PADDING, Batch, Example

Row = tuple[Example, ...]


def best_fit(lengths: Sequence[int] | Int64[np.ndarray, " examples"], *, room: int) -> list[list[int]]:
    """Distribute examples of at most `room` tokens over rows of so many, by index.

    Ties go to the earlier one, so equal data gives equal rows.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # room that is left and number of the row, sorted
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(open_rows, (length, 0))
        if place == len(open_rows):
            rows.append([])
            left, number = room, len(rows) - 1
        else:
            left, number = open_rows.pop(place)
        rows[number].append(index)
        if left > length:
            insort(open_rows, (left - length, number))
    return rows


class Rows(Sequence[Row]):
    """Examples in rows."""

    def __init__(self, examples: Sequence[Example], members: Sequence[Sequence[int]] | None = None) -> None:
        """Arrange examples, by index; every example in a row of its own when there are no members."""
        self._examples = examples
        self._members = members

    def __len__(self) -> int:
        return len(self._examples) if self._members is None else len(self._members)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override] (rows are taken one by one)
        """One row."""
        if self._members is None:
            return (self._examples[index],)
        return tuple(self._examples[one] for one in self._members[index])


def make_batch(rows: Sequence[Row]) -> Batch:
    """Lay rows out as arrays, padded at the end to the longest one."""
    shape = len(rows), max(sum(len(example.ids) for example in row) for row in rows)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    positions, documents = np.full(shape, PADDING, np.int64), np.full(shape, PADDING, np.int64)
    for number, row in enumerate(rows):
        start = 0
        for document, example in enumerate(row):
            span = slice(start, start + len(example.ids))
            ids[number, span] = example.ids
            labels[number, span] = (IGNORED, *example.labels[1:])
            positions[number, span] = np.arange(len(example.ids))
            documents[number, span] = document
            start = span.stop
    return Batch(ids, labels, positions, documents)
