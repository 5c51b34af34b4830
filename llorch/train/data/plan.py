"""Which rows a step trains on, as a pure function of its number: a resumed run needs no state of a sampler."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from llorch.train.batch import Batch
from llorch.train.data.packing import Row, make_batch


class Plan:
    """The order of training: every epoch takes every row once, in an order of its own."""

    def __init__(self, rows: Sequence[Row], *, batch_size: int, accumulation: int, seed: int) -> None:
        """Fix the order; `accumulation` is forward passes of an optimizer step, the seed at least 0."""
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
        """The batches of one optimizer step, after so many others."""
        return list(batches(self.rows(number), self._batch_size))

    def rows(self, number: int) -> list[Row]:
        """The rows of one optimizer step, in the order of its batches; their examples know where they come from."""
        epoch, place = divmod(number, self.steps_per_epoch)
        order = shuffled(len(self._rows), self._seed, epoch)
        return [self._rows[int(row)] for row in order[place * self._step_size :][: self._step_size]]


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> Int64[np.ndarray, " count"]:
    """A random order that depends on the arguments only.

    The bits of PCG64 are the same in every version of NumPy; what `Generator.permutation` makes of them need not be.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    return np.argsort(bits, kind="stable")


def batches(rows: Sequence[Row], batch_size: int) -> Iterator[Batch]:
    """Cut rows into batches, in order, for a step or to evaluate; the last one may have fewer rows."""
    for start in range(0, len(rows), batch_size):
        yield make_batch([rows[index] for index in range(start, min(start + batch_size, len(rows)))])
