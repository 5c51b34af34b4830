"""Packed rows of examples, the order of training, and the arrays of a batch.

The order is a pure function of the step number, so a resumed run needs no sampler state. Packing is best-fit
decreasing: examples from the longest to the shortest, each into the row with the least sufficient room. Every example
in a row is a separate document: its positions start at 0, and its tokens attend to no other document.

Source: Johnson 1974, "Fast algorithms for bin packing"; the order of TRL's `packing_strategy="bfd"`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from llorch.runtime.errors import UserError
from llorch.training.batch import IGNORED, PADDING, Batch, Example

Row = tuple[Example, ...]


def best_fit(lengths: Sequence[int] | Int64[np.ndarray, " examples"], *, room: int) -> list[list[int]]:
    """Distribute examples over rows of `room` tokens; return each row's example indices. The earlier row wins a tie."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (remaining room, row number), sorted
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[index])
        slot = bisect_left(open_rows, (length, 0))  # row with the least sufficient room
        if slot == len(open_rows):
            rows.append([])
            remaining, number = room, len(rows) - 1
        else:
            remaining, number = open_rows.pop(slot)
        rows[number].append(index)
        if remaining > length:
            insort(open_rows, (remaining - length, number))
    return rows


class PackedRows(Sequence[Row]):
    """Rows of packed examples."""

    def __init__(self, examples: Sequence[Example], members: Sequence[Sequence[int]] | None = None) -> None:
        """Arrange examples by `members`, the example indices of each row; None means one example per row."""
        self._examples = examples
        self._members = members

    def __len__(self) -> int:
        return len(self._examples) if self._members is None else len(self._members)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override] (no slices)
        """Return one row."""
        if self._members is None:
            return (self._examples[index],)
        return tuple(self._examples[member] for member in self._members[index])


class TrainingOrder:
    """Order of training: each epoch uses every row once, in another order; its last step may have fewer rows."""

    def __init__(self, rows: Sequence[Row], *, batch_size: int, accumulation: int, seed: int) -> None:
        """Fix the order; `accumulation` is the number of forward passes per optimizer step; the seed is at least 0."""
        for name, value, low in (("batch_size", batch_size, 1), ("accumulation", accumulation, 1), ("seed", seed, 0)):
            if value < low:
                raise UserError(f"{name}: expected at least {low}, got {value}")
        if len(rows) == 0:
            raise UserError("data: expected at least one row to train on, got none")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._step_size = batch_size * accumulation
        self.steps_per_epoch = -(-len(rows) // self._step_size)

    def step(self, number: int) -> list[Batch]:
        """Return the batches of optimizer step `number`, counted from 0."""
        return list(batches(self.rows(number), self._batch_size, samples=self.samples(number)))

    def rows(self, number: int) -> list[Row]:
        """Return the rows of one optimizer step, in the order of its batches."""
        return [self._rows[int(row)] for row in self.samples(number)]

    def samples(self, number: int) -> Int64[np.ndarray, " rows"]:
        """Return the row numbers of one optimizer step in the data set."""
        epoch, step_in_epoch = divmod(number, self.steps_per_epoch)
        order = shuffled(len(self._rows), self._seed, epoch)
        return order[step_in_epoch * self._step_size :][: self._step_size]


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> Int64[np.ndarray, " count"]:
    """Shuffle reproducibly: PCG64's bits are equal in all NumPy versions, those of `permutation` may differ."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    return np.argsort(bits, kind="stable")


def batches(
    rows: Sequence[Row], batch_size: int, *, samples: Int64[np.ndarray, " rows"] | None = None
) -> Iterator[Batch]:
    """Split rows into batches in order; the last may be smaller. `samples`: see `Batch`; None counts from 0."""
    samples = np.arange(len(rows)) if samples is None else samples
    for start in range(0, len(rows), batch_size):
        part = range(start, min(start + batch_size, len(rows)))
        yield make_batch([rows[index] for index in part], samples[part.start : part.stop])


def make_batch(rows: Sequence[Row], samples: Int64[np.ndarray, " batch"]) -> Batch:
    """Arrange rows as arrays, padded at the end to the longest row; `samples`: see `Batch`."""
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
    return Batch(ids, labels, positions, documents, samples)
