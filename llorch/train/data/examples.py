"""Many examples in little memory: 5 bytes a token, where an `Example` of its own needs about 40."""

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from jaxtyping import Int64

from llorch.train.batch import IGNORED, Example


class Examples(Sequence[Example]):
    """A list of examples that are made when they are asked for."""

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

    def content(self) -> Iterable[bytes]:
        """What tells one data set from another: ids, what is learned, where examples end; sources do not count."""
        yield self._ids.astype("<i4").tobytes()
        yield self._learned.tobytes()
        yield self._ends.astype("<i8").tobytes()
