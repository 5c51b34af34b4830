"""Which rows a step trains on, as a pure function of its number: a resumed run needs no state of a sampler."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from llorch.train.batch import Batch
from llorch.train.data.packing import Row, make_batch


class Plan:
    """The order of training: every epoch takes every row once, in an order of its own.

    Attributes:
        steps_per_epoch: Optimizer steps; the last one of an epoch may have fewer rows.
    """

    def __init__(self, rows: Sequence[Row], *, batch_size: int, accumulation: int, seed: int) -> None:
        """Fix the order.

        Args:
            rows: What to train on, at least one.
            batch_size: Rows of a forward pass.
            accumulation: Forward passes of an optimizer step.
            seed: Of the order; at least 0.

        Raises:
            ValueError: There is no row, or a number is too small.
        """
        for name, value, low in (("batch_size", batch_size, 1), ("accumulation", accumulation, 1), ("seed", seed, 0)):
            if value < low:
                raise ValueError(f"{name}: expected at least {low}, got {value}")
        if len(rows) == 0:
            raise ValueError("data: expected at least one row to train on, got none")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._step_size = batch_size * accumulation
        self.steps_per_epoch = -(-len(rows) // self._step_size)

    def step(self, number: int) -> list[Batch]:
        """The batches of one optimizer step.

        Args:
            number: Steps before this one.

        Returns:
            At most `accumulation` batches of at most `batch_size` rows.
        """
        return list(batches(self.rows(number), self._batch_size))

    def rows(self, number: int) -> list[Row]:
        """The rows of one optimizer step, in the order in which its batches have them.

        Args:
            number: Steps before this one.

        Returns:
            The rows; their examples know where they come from.
        """
        epoch, place = divmod(number, self.steps_per_epoch)
        order = shuffled(len(self._rows), self._seed, epoch)
        return [self._rows[int(row)] for row in order[place * self._step_size :][: self._step_size]]


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> Int64[np.ndarray, " count"]:
    """A random order that depends on the arguments only.

    The bits of PCG64 are the same in every version of NumPy; what `Generator.permutation` makes of them need not be.

    Args:
        count: How many there are to order.
        seed: Of the run.
        epoch: Number of the epoch.

    Returns:
        Every index once.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    return np.argsort(bits, kind="stable")


def batches(rows: Sequence[Row], batch_size: int) -> Iterator[Batch]:
    """Cut rows into batches, in order: for a step, or to evaluate.

    Args:
        rows: Any number of rows.
        batch_size: Most rows of a batch.

    Yields:
        Batches; the last one may have fewer rows.
    """
    for start in range(0, len(rows), batch_size):
        yield make_batch([rows[index] for index in range(start, min(start + batch_size, len(rows)))])
