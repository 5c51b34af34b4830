"""The recorder: what an engine in Python shows of itself while it runs.

    dump = llorch.Recorder(engine="mine", dtype="float32")
    dump.begin(ids)                             a pass; each further one goes on in the same cache
    q = dump("q_rope", rope(q), layer=i)        in the middle of a line: the array goes on as it is

    @dump.stage("attn_norm")                    or around a function: its argument `layer`, else the number of the call
    def norm(x, weight): ...

    dump.save("my-dump")                        for `llorch diagnose`; or stay here with dump.stage_dump(weights)

Names are those of the stage table, or the engine's own: those need a mapping, see `mapping`. `production_logits` are
those of the same pass in a run that nobody watched.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from llorch.engines.dumps.mapping import NameMap
from llorch.engines.dumps.raw import RawArray, RawDump, as_numbers
from llorch.engines.dumps.stage_dump import Features, StageDump
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import Weights
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, key

Array = TypeVar("Array")
Result = TypeVar("Result")
Given = ParamSpec("Given")


class Recorder:
    """Arrays of one sequence, copied into memory when they are shown."""

    def __init__(self, *, source: str = "recorder", **features: str | bool) -> None:
        """Start empty.

        Args:
            source: Where it comes from, for messages.
            features: What the engine says of itself: attributes of `Features`.
        """
        self.source = source
        self.features = Features(**features)  # type: ignore[arg-type] (checked by its users)
        self.weights: dict[str, str] = {}  # `llorch.engines.dumps.raw.digest` of decoded tensors, by the engine's names
        self.passes: list[Tokens] = []
        self.arrays: dict[tuple[int, str, int | None], RawArray] = {}  # by pass, name and layer
        self._calls: Counter[tuple[int, str]] = Counter()

    def begin(self, ids: Sequence[int], first_position: int | None = None) -> None:
        """Start a pass.

        Args:
            ids: Its tokens.
            first_position: Position of the first one; where the pass before ended unless told.
        """
        if first_position is None:
            first_position = self.passes[-1].first_position + len(self.passes[-1].ids) if self.passes else 0
        self.passes.append(Tokens(tuple(map(int, ids)), first_position))

    def __call__(self, name: str, array: Array, *, layer: int | None = None) -> Array:
        """Record an array, and hand it on; see `add`."""
        self.add(name, np.asarray(array), layer=layer)
        return array

    def add(
        self,
        name: str,
        array: np.ndarray,
        *,
        layer: int | None = None,
        tokens: Sequence[int] | None = None,
        axes: str = "",
        stored: str = "",
    ) -> None:
        """Record an array of the pass that was begun last; ValueError if there is none, or it has the name already.

        Args:
            name: Of the stage table, or the engine's own.
            array: Copied.
            layer: None outside the layers.
            tokens: Which tokens of the pass it has, counted from 0; all unless told.
            axes: Names of its axes, `seq heads head_dim`, where they are not those of the stage.
            stored: What its bits are where NumPy has no such type: `bfloat16` for unsigned integers of 16 bits.
        """
        place = (len(self.passes) - 1, name, layer)
        if not self.passes or place in self.arrays:
            twice = f"{key(name, layer)} is already in pass {place[0]}; call begin(ids) before each pass"
            raise UserError(f"recorder: {twice if self.passes else 'call begin(ids) before the first array'}")
        stored = stored or array.dtype.name
        kept = array.view(np.uint16).copy() if array.dtype.name == "bfloat16" else array.copy()
        read = functools.partial(as_numbers, kept, stored)
        tokens = tokens if tokens is None else tuple(tokens)
        self.arrays[place] = RawArray(name, stored, kept.shape, read, layer, tokens, tuple(axes.split()))

    def stage(self, name: str, *, layer: str = "layer") -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
        """Make a decorator that records the result of a function as `name`.

        Args:
            name: Name as for `add`.
            layer: Argument of the function that holds the layer. A function without it is called once in each layer.

        Returns:
            The decorator.
        """

        def wrap(function: Callable[Given, Result]) -> Callable[Given, Result]:
            signature = inspect.signature(function)

            @functools.wraps(function)
            def recorded(*args: Given.args, **kwargs: Given.kwargs) -> Result:
                result = function(*args, **kwargs)
                given = signature.bind(*args, **kwargs).arguments
                return self(name, result, layer=given[layer] if layer in given else self._next_layer(name))

            return recorded

        return wrap

    def _next_layer(self, name: str) -> int | None:
        """Count this call in its pass and return its number, from 0; None for a stage outside the layers."""
        if name in BY_NAME and not BY_NAME[name].in_layer:
            return None
        call = (len(self.passes), name)
        self._calls[call] += 1
        return self._calls[call] - 1

    def raw_dump(self) -> RawDump:
        """Return the recorded arrays under the names of the engine."""
        arrays = tuple((number, array) for (number, _, _), array in self.arrays.items())
        return RawDump(self.source, arrays, tuple(self.passes), self.features, self.weights)

    def stage_dump(self, weights: Weights, *, mapping: NameMap | None = None) -> StageDump:
        """Return the recorded arrays as stages of a model with these weights, as `stage_mapping.stage_dump` does."""
        return stage_dump(self.raw_dump(), weights.config, mapping=mapping, weights=weights)

    def save(self, folder: str | Path) -> None:
        """Write a dump that `llorch diagnose` reads, in place of one that is there."""
        with DumpWriter(folder, weights=self.weights, **asdict(self.features)) as writer:
            for number, tokens in enumerate(self.passes):
                writer.begin(tokens.ids, tokens.first_position)
                for array in (array for (n_pass, _, _), array in self.arrays.items() if n_pass == number):
                    bits = array.read()
                    if array.stored == "bfloat16":
                        bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
                    said = {"layer": array.layer, "tokens": array.tokens, "axes": " ".join(array.axes)}
                    writer.add(array.name, bits, dtype=array.stored, **said)
