"""Weights of a large model while several passes go through it together: a matrix is decoded once for all of them.

The passes are the ones that run for users, over packed matrices, tile by tile; only a tile that another pass has
decoded before is not decoded again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from llorch.files import Weights
from llorch.files.matrix import Matrix
from llorch.files.packed import Packed
from llorch.verify.lockstep import Lockstep, Turn

T = TypeVar("T")


@dataclass
class _Here:
    """Where in the model a pass is: in which layer, or outside of all."""

    turn: Turn
    place: str | None = None


_here: ContextVar[_Here | None] = ContextVar("here", default=None)


@dataclass
class _Kept:
    """Decoded matrices of the place in which all passes are."""

    place: str = ""
    matrices: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class _PackedOnce(Packed):
    """A tensor that is decoded once as long as passes are in its layer."""

    kept: _Kept

    def decode(self) -> np.ndarray:
        """The whole tensor as float32, not to be written to."""
        if _here.get() is None:
            return super().decode()
        if self.name not in self.kept.matrices:
            self.kept.matrices[self.name] = super().decode()
        return self.kept.matrices[self.name]

    def tiles(self) -> Iterator[tuple[int, np.ndarray]]:
        """As there."""
        if _here.get() is None:
            yield from super().tiles()
            return
        whole, step = self.decode(), self.rows_at_once
        for start in range(0, len(whole), step):
            yield start, whole[start : start + step]


class SharedWeights(Weights):
    """Packed weights that passes take turns with."""

    def __init__(self, weights: Weights, say: Callable[[str], None] = lambda line: None) -> None:
        """Over the same file; `say` is told of every layer."""
        vars(self).update(vars(weights.using(packed=True)))
        self._kept, self._say = _Kept(), say

    def together(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Let passes over these weights, or variants of them, go through the layers together; what each returns."""

        def take_turns(one: Callable[[], T], turn: Turn) -> T:
            _here.set(_Here(turn))
            return one()

        try:
            return Lockstep([partial(take_turns, one) for one in passes]).run()
        finally:
            self._kept.matrices.clear()

    def __getitem__(self, name: str) -> Any:
        """As there, when all passes have got as far as this layer."""
        here, place = _here.get(), name.rpartition(".")[0]
        if here is not None and place != here.place:
            if here.place is not None:
                here.turn()
            here.place = place
            if place != self._kept.place:
                self._kept.matrices.clear()
                self._kept.place = place
                self._say(place.replace("layers.", "layer ") or "logits")
        return super().__getitem__(name)

    def _matrix(self, name: str) -> Matrix:
        matrix = super()._matrix(name)
        matrix.packed = _PackedOnce(**vars(matrix.packed), kept=self._kept)
        return matrix
