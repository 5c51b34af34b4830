"""Packed weights of a large model that several passes share layer by layer: each matrix is decoded once for all passes.

A packed matrix stays in its quantised type, and each use decodes it. The passes run as for users, over packed matrices,
tile (rows) by tile. Only the decoding is shared: each pass waits until all passes have left the previous layer.
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
class _PassPosition:
    """Current layer of a pass; None before the first."""

    turn: Turn  # lets the other passes run until they reach the same layer
    layer_name: str | None = None


_position: ContextVar[_PassPosition | None] = ContextVar("here", default=None)


class _DecodedLayer:
    """Decoded matrices of the layer in which all passes are."""

    def __init__(self, n_layers: int, progress: Callable[[str], None]) -> None:
        self.matrices: dict[str, np.ndarray] = {}
        self._n_layers, self._progress = n_layers, progress
        self._layer_name, self._rounds, self._started = "", 0, 0.0

    def move(self, layer_name: str) -> None:
        """Enter a layer: drop the matrices of the previous one, report the layer and the time left in this round."""
        if layer_name == self._layer_name:
            return
        self._layer_name = layer_name
        self.matrices.clear()
        layer = int(layer_name.removeprefix("layers.") or self._n_layers)  # "" outside the layers: embedding, head
        if layer == 0:
            self._rounds, self._started = self._rounds + 1, time.monotonic()
        seconds_left = (time.monotonic() - self._started) / max(layer, 1) * (self._n_layers - layer)
        estimate = f", about {seconds_left:.0f} s left" if 0 < layer < self._n_layers else ""
        self._progress(f"round {self._rounds}, layer {layer} of {self._n_layers}{estimate}")


@dataclass(frozen=True)
class _SharedPacked(Packed):
    """Packed tensor that is decoded once while the passes are in its layer; outside of `together`, at each use."""

    decoded: _DecodedLayer
    packed: Packed

    @property
    def n_bytes(self) -> int:
        """Number of bytes of the packed matrix."""
        return self.packed.n_bytes

    def decode_rows(self, rows: Rows) -> np.ndarray:
        """Decode some rows as `Packed.decode_rows` does."""
        return self.packed.decode_rows(rows)

    def require_scales(self) -> None:
        """Check the block scales as `Packed.require_scales` does."""
        self.packed.require_scales()

    def decode(self) -> np.ndarray:
        """Decode the whole tensor as float32; the caller must not modify the shared array."""
        if _position.get() is None:
            return self.packed.decode()
        if self.name not in self.decoded.matrices:
            self.decoded.matrices[self.name] = self.packed.decode()
        return self.decoded.matrices[self.name]

    def tiles(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the pieces of a matrix as `Packed.tiles` does."""
        if _position.get() is None:
            yield from self.packed.tiles()
            return
        decoded, step = self.decode(), self.rows_at_once
        for start in range(0, len(decoded), step):
            yield start, decoded[start : start + step]


class SharedWeights(Weights):
    """Packed weights that several passes share layer by layer."""

    def __init__(self, weights: Weights, progress: Callable[[str], None] = lambda line: None) -> None:
        """Wrap the same file as `weights`; call `progress` for every layer."""
        vars(self).update(vars(weights.using(packed=True)))
        self._decoded = _DecodedLayer(weights.config.n_layers, progress)

    def together(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run passes over these weights, or variants of them, layer by layer in turn; return their results."""

        def run_in_turn(run_pass: Callable[[], T], turn: Turn) -> T:
            _position.set(_PassPosition(turn))
            return run_pass()

        try:
            return LayerwiseJobs([partial(run_in_turn, run_pass) for run_pass in passes]).run()
        finally:
            self._decoded.matrices.clear()

    def __getitem__(self, name: str) -> Any:
        """Return a weight; a pass that enters a new layer waits until all passes have left the previous one."""
        position, layer_name = _position.get(), name.rpartition(".")[0]
        if position is not None and layer_name != position.layer_name:
            if position.layer_name is not None:
                position.turn()
            position.layer_name = layer_name
            self._decoded.move(layer_name)
        return super().__getitem__(name)

    def _matrix(self, name: str) -> Matrix:
        matrix = super()._matrix(name)
        packed = matrix.packed
        header = packed.name, packed.path, packed.raw, packed.ggml_type, packed.shape
        matrix.packed = _SharedPacked(*header, decoded=self._decoded, packed=packed)
        return matrix
