"""Weights of a large model while several passes go through it together: a matrix is decoded once for all of them.

The passes are the ones that run for users, over packed matrices, tile by tile; only a tile that another pass has
decoded before is not decoded again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from llorch.files import Weights
from llorch.files.layerwise import LayerwiseJobs, Turn
from llorch.files.matrix import Matrix
from llorch.files.packed import Packed, Rows

T = TypeVar("T")


@dataclass
class _Here:
    """Where in the model a pass is: in which layer, or outside of all."""

    turn: Turn
    place: str | None = None


_here: ContextVar[_Here | None] = ContextVar("here", default=None)


class _Kept:
    """Decoded matrices of the place in which all passes are."""

    def __init__(self, n_layers: int, progress: Callable[[str], None]) -> None:
        self.matrices: dict[str, np.ndarray] = {}
        self._n_layers, self._say = n_layers, progress
        self._place, self._rounds, self._began = "", 0, 0.0

    def move(self, place: str) -> None:
        """Forget the last place, and say where passes are, and when they will be through all layers."""
        if place == self._place:
            return
        self._place = place
        self.matrices.clear()
        layer = int(place.removeprefix("layers.") or self._n_layers)
        if layer == 0:
            self._rounds, self._began = self._rounds + 1, time.monotonic()
        left = (time.monotonic() - self._began) / max(layer, 1) * (self._n_layers - layer)
        soon = f", about {left:.0f} s left" if 0 < layer < self._n_layers else ""
        self._say(f"round {self._rounds}, layer {layer} of {self._n_layers}{soon}")


@dataclass(frozen=True)
class _PackedOnce(Packed):
    """A tensor that is decoded once as long as passes are in its layer."""

    kept: _Kept
    once: Packed

    @property
    def n_bytes(self) -> int:
        """Number of bytes of the packed matrix."""
        return self.once.n_bytes

    def decode_rows(self, rows: Rows) -> np.ndarray:
        """Decode some rows as `Packed.decode_rows` does."""
        return self.once.decode_rows(rows)

    def require_scales(self) -> None:
        """Check the block scales as `Packed.require_scales` does."""
        self.once.require_scales()

    def decode(self) -> np.ndarray:
        """Decode the whole tensor as float32; the caller must not write to the array."""
        if _here.get() is None:
            return self.once.decode()
        if self.name not in self.kept.matrices:
            self.kept.matrices[self.name] = self.once.decode()
        return self.kept.matrices[self.name]

    def tiles(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the pieces of a matrix as `Packed.tiles` does."""
        if _here.get() is None:
            yield from self.once.tiles()
            return
        whole, step = self.decode(), self.rows_at_once
        for start in range(0, len(whole), step):
            yield start, whole[start : start + step]


class SharedWeights(Weights):
    """Packed weights that passes take turns with."""

    def __init__(self, weights: Weights, progress: Callable[[str], None] = lambda line: None) -> None:
        """Share the file of `weights`; `progress` is told of every layer."""
        vars(self).update(vars(weights.using(packed=True)))
        self._kept = _Kept(weights.config.n_layers, progress)

    def together(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Let passes over these weights, or variants of them, go through the layers together; what each returns."""

        def take_turns(one: Callable[[], T], turn: Turn) -> T:
            _here.set(_Here(turn))
            return one()

        try:
            return LayerwiseJobs([partial(take_turns, one) for one in passes]).run()
        finally:
            self._kept.matrices.clear()

    def __getitem__(self, name: str) -> Any:
        """Return a weight after all passes have got as far as the weight's layer."""
        here, place = _here.get(), name.rpartition(".")[0]
        if here is not None and place != here.place:
            if here.place is not None:
                here.turn()
            here.place = place
            self._kept.move(place)
        return super().__getitem__(name)

    def _matrix(self, name: str) -> Matrix:
        matrix = super()._matrix(name)
        stored = matrix.packed
        header = stored.name, stored.path, stored.raw, stored.ggml_type, stored.shape
        matrix.packed = _PackedOnce(*header, kept=self._kept, once=stored)
        return matrix
