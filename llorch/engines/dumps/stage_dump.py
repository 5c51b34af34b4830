"""Result of reading a dump: stages (intermediate arrays) as in `stages.table`, of passes (calls of the forward)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llorch.stages.stage_ref import Tokens, heads_axis, token_axis
from llorch.stages.table import Stage

# KV caches of 8-bit integers, by the values that share a scale: all of a token, its values of one KV head (a row), all
# tokens of a KV head, 32 values of a row.
INT8_CACHES = ("int8-token", "int8-row", "int8-head", "int8-block")


@dataclass(frozen=True)
class Features:
    """Declared arithmetic of an engine; empty where nothing is declared.

    Attributes:
        engine: Name of the engine.
        dtype: Dtype of the activations: float32, bfloat16, float16.
        kv_cache: Dtype of the KV cache: float32, float16, bfloat16, or one of `INT8_CACHES`.
        activations: Type to which products round their inputs: F16, BF16, Q8_0, Q8_1, Q8_K.
        flash_attention: True if scores and probabilities are never computed as arrays.
    """

    engine: str = ""
    dtype: str = ""
    kv_cache: str = ""
    activations: str = ""
    flash_attention: bool = False


@dataclass(frozen=True)
class DumpedArray:
    """One stage of one pass.

    Attributes:
        name: Name by the engine.
        stored: Dtype in the dump, `float32`, `bfloat16` ...
        read: Function that returns the array, float32 or float64, in the table's shape, only what the array has.
        tokens: Indices of the tokens of the pass that the array has; None for all tokens.
        keys: Number of keys in the dumped array, the newest, if the older keys are missing; else None.
        heads: First element, and the one after the last, on the axis of heads, if the array has a share; else None.
        is_reordered: True if a declared permutation was undone: neighbouring RoPE pairs, or tiled value heads.
    """

    name: str
    stored: str
    read: Callable[[], np.ndarray]
    tokens: tuple[int, ...] | None = None
    keys: int | None = None
    heads: tuple[int, int] | None = None
    is_reordered: bool = False

    def select(self, array: np.ndarray, stage: Stage) -> np.ndarray:
        """Select the heads, keys and tokens of a whole stage that this array has."""
        newest = slice(None if self.keys is None else -self.keys, None)
        heads = slice(*self.heads or (None,))
        cuts = [
            newest if axis == "ctx" else heads if index == heads_axis(stage) else slice(None)
            for index, axis in enumerate(stage.axes.split())
        ]
        array, axis = array[tuple(cuts)], token_axis(stage)
        return array if self.tokens is None or axis is None else array.take(self.tokens, axis=axis)


@dataclass(frozen=True)
class Defect:
    """Error of the engine outside the values that a stage has, which the reader of its dump found.

    Attributes:
        n_pass: Number of the pass.
        key: Stage key of the array.
        sentence: Message for a person.
    """

    n_pass: int
    key: str
    sentence: str


@dataclass(frozen=True)
class Misread:
    """Quantised matrices whose hashes in the dump show that the engine decoded other numbers than the folder has.

    Attributes:
        sentence: Message that names the matrices, with advice.
        names: llorch's names of the matrices.
        mistakes: Known mistakes that together give exactly these numbers, by name, with their sentences; else empty.
        is_rounding: True if the numbers are the folder's, rounded to another dtype than the dump declares.
    """

    sentence: str
    names: frozenset[str]
    mistakes: Mapping[str, str]
    is_rounding: bool = False


@dataclass(frozen=True)
class StageDump:
    """Stages that an engine dumped.

    Attributes:
        source: Path or name of the dump, for messages.
        passes: Tokens of the passes, which ran one after the other with the same cache.
        dumped: Arrays by pass number and stage key, like `(0, "l0.q_rope")`.
        features: Declared arithmetic of the engine.
        notes: Facts that llorch detected because they were not declared, one sentence each.
        production: Logits of the same passes from a run without recording, by pass number.
        n_before: Number of cached tokens before the first pass, which the dump does not contain; None if unknown.
        misread: Matrices that the engine decoded wrongly, according to the hashes of its weights.
        left_out: Pass and stage key of arrays that cannot be compared, by reason.
        defects: Errors that the reader found, in the order of the arrays.
    """

    source: str
    passes: tuple[Tokens, ...]
    dumped: Mapping[tuple[int, str], DumpedArray]
    features: Features = field(default_factory=Features)
    notes: Sequence[str] = field(default=())
    production: Mapping[int, DumpedArray] = field(default_factory=dict)
    n_before: int | None = 0
    misread: Misread | None = None
    left_out: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()

    @classmethod
    def of_arrays(
        cls, passes: Sequence[Tokens], *arrays: Mapping[str, np.ndarray], source: str = "arrays", **features: str | bool
    ) -> "StageDump":
        """Build a dump from traces in memory, one trace for each pass."""
        dumped = {
            (number, key): DumpedArray(key, str(array.dtype), lambda array=array: array)
            for number, trace in enumerate(arrays)
            for key, array in trace.items()
        }
        return cls(source, tuple(passes), dumped, Features(**features))  # type: ignore[arg-type] (checked by its users)

    def of_pass(self, number: int) -> Iterator[tuple[str, DumpedArray]]:
        """Yield the stage keys and dumped arrays of one pass."""
        return ((key, dumped) for (array_pass, key), dumped in self.dumped.items() if array_pass == number)
