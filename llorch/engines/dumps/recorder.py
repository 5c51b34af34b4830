"""Recorder of the stages (named intermediate arrays, see `stages.table`) of a Python engine while it runs.

    dump = llorch.Recorder(engine="mine", dtype="float32")
    dump.begin(ids)                             start a pass; further passes continue with the same cache
    q = dump("q_rope", rope(q), layer=i)        inside an expression: returns the array unchanged

    @dump.stage("attn_norm")                    or as a decorator: layer from the argument `layer` or the call number
    def norm(x, weight): ...

    dump.save("my-dump")                        for `llorch diagnose`; or use dump.stage_dump(weights)

Names are stage names of the table, or the engine's own names, which need a mapping file, see `mapping`. The name
`production_logits` is for logits of the same pass from a run without recording, to check that recording changed none.
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
    """Recorder of the arrays of one sequence, which it copies into memory."""

    def __init__(self, *, source: str = "recorder", **features: str | bool) -> None:
        """Create an empty recorder; `source` names it in messages, `features` are attributes of `Features`."""
        self.source = source
        self.features = Features(**features)  # type: ignore[arg-type] (checked by its users)
        self.weights: dict[str, str] = {}  # `llorch.engines.dumps.raw.digest` of decoded weights, by engine name
        self.passes: list[Tokens] = []
        self.arrays: dict[tuple[int, str, int | None], RawArray] = {}  # by pass, name and layer
        self._calls: Counter[tuple[int, str]] = Counter()

    def begin(self, ids: Sequence[int], first_position: int | None = None) -> None:
        """Start a pass (one call of the forward) with these token ids; by default after the previous pass."""
        if first_position is None:
            first_position = self.passes[-1].first_position + len(self.passes[-1].ids) if self.passes else 0
        self.passes.append(Tokens(tuple(map(int, ids)), first_position))

    def __call__(self, name: str, array: Array, *, layer: int | None = None) -> Array:
        """Record an array and return it unchanged; see `add`."""
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
        """Record an array of the current pass; raise UserError if there is no pass, or if the name is already used.

        Args:
            name: Stage name of the table, or the engine's own name.
            array: Array, which is copied.
            layer: Number of the layer; None outside the layers.
            tokens: Indices of the tokens of the pass that the array has; None: all tokens.
            axes: Names of the axes, like `seq heads head_dim`, if they are not the stage's.
            stored: Dtype of the bits if NumPy has no such dtype: `bfloat16` for 16-bit unsigned integers.
        """
        array_key = (len(self.passes) - 1, name, layer)
        if not self.passes or array_key in self.arrays:
            problem = f"{key(name, layer)} is already in pass {array_key[0]}; call begin(ids) before each pass"
            raise UserError(f"recorder: {problem if self.passes else 'call begin(ids) before the first array'}")
        stored = stored or array.dtype.name
        copied = array.view(np.uint16).copy() if array.dtype.name == "bfloat16" else array.copy()
        read = functools.partial(as_numbers, copied, stored)
        tokens = tokens if tokens is None else tuple(tokens)
        self.arrays[array_key] = RawArray(name, stored, copied.shape, read, layer, tokens, tuple(axes.split()))

    def stage(self, name: str, *, layer: str = "layer") -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
        """Return a decorator that records the return value of a function as `name`, see `add`.

        `layer` is the name of the function's argument for the layer. Without such an argument, calls of a pass are
        counted: call n is layer n.
        """

        def wrap(function: Callable[Given, Result]) -> Callable[Given, Result]:
            signature = inspect.signature(function)

            @functools.wraps(function)
            def wrapper(*args: Given.args, **kwargs: Given.kwargs) -> Result:
                result = function(*args, **kwargs)
                arguments = signature.bind(*args, **kwargs).arguments
                return self(name, result, layer=arguments[layer] if layer in arguments else self._next_layer(name))

            return wrapper

        return wrap

    def _next_layer(self, name: str) -> int | None:
        """Count this call, and return its number in its pass, from 0; None for a stage outside the layers."""
        if name in BY_NAME and not BY_NAME[name].in_layer:
            return None
        call = (len(self.passes), name)
        self._calls[call] += 1
        return self._calls[call] - 1

    def raw_dump(self) -> RawDump:
        """Return the recorded arrays by the names of the engine."""
        arrays = tuple((number, array) for (number, _, _), array in self.arrays.items())
        return RawDump(self.source, arrays, tuple(self.passes), self.features, self.weights)

    def stage_dump(self, weights: Weights, *, mapping: NameMap | None = None) -> StageDump:
        """Return the recorded arrays as stages of a model with these weights, see `stage_mapping.stage_dump`."""
        return stage_dump(self.raw_dump(), weights.config, mapping=mapping, weights=weights)

    def save(self, folder: str | Path) -> None:
        """Write a dump for `llorch diagnose`; replace an existing dump."""
        with DumpWriter(folder, weights=self.weights, **asdict(self.features)) as writer:
            for number, tokens in enumerate(self.passes):
                writer.begin(tokens.ids, tokens.first_position)
                for array in (array for (array_pass, _, _), array in self.arrays.items() if array_pass == number):
                    bits = array.read()
                    if array.stored == "bfloat16":
                        bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
                    declared = {"layer": array.layer, "tokens": array.tokens, "axes": " ".join(array.axes)}
                    writer.add(array.name, bits, dtype=array.stored, **declared)
