"""What every dump ends in: stages of the table, in the layout of the table, of one or several passes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llorch.stages.stage_ref import Tokens


@dataclass(frozen=True)
class Features:
    """What an engine says of its own arithmetic; empty where it says nothing.

    Attributes:
        engine: Its name.
        dtype: Of its activations: float32, bfloat16, float16.
        kv_cache: Type of its cache: float32, float16, bfloat16.
        activations: What products round their inputs to: F16, BF16, Q8_0, Q8_1, Q8_K.
        flash_attention: Whether scores and probabilities are never made.
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
        name: As the engine calls it.
        stored: The dtype it was stored in, `float32`, `bfloat16` ...
        read: Gives the array, float32 or float64, in the shape of the stage table; rows of `tokens` only.
        tokens: Which tokens of the pass, counted from 0, the array has; None for all of them.
        keys: How many of the newest keys of the context a cache has, where a window leaves out the others.
    """

    name: str
    stored: str
    read: Callable[[], np.ndarray]
    tokens: tuple[int, ...] | None = None
    keys: int | None = None


@dataclass(frozen=True)
class Misread:
    """Quantised matrices that an engine read with other numbers than the folder has.

    Attributes:
        sentence: The matrices, and what to do.
        names: llorch's names of the matrices.
        mistakes: Sentences of the known mistakes that read exactly these numbers, by name; empty: not all are known.
        is_rounding: The numbers are those of the folder, rounded to another dtype than the dump declares.
    """

    sentence: str
    names: frozenset[str]
    mistakes: Mapping[str, str]
    is_rounding: bool = False


@dataclass(frozen=True)
class StageDump:
    """Stages that an engine showed.

    Attributes:
        source: What it was read from, for messages.
        passes: In the order they ran, one after the other into the same cache.
        dumped: By the number of the pass and the stage key, `(0, "l0.q_rope")`.
        features: What the engine says of itself.
        notes: What was found rather than declared, one sentence each.
        production: By the number of the pass, logits of the run that nobody watched.
        n_before: How many tokens the cache held before the first pass, which the dump does not show; None: unknown.
        misread: What the engine's reader of a quantised folder got wrong, by the hashes of its weights.
    """

    source: str
    passes: tuple[Tokens, ...]
    dumped: Mapping[tuple[int, str], DumpedArray]
    features: Features = field(default_factory=Features)
    notes: Sequence[str] = field(default=())
    production: Mapping[int, DumpedArray] = field(default_factory=dict)
    n_before: int | None = 0
    misread: Misread | None = None

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
        """Stage keys of one pass, and what was seen of each."""
        return ((key, dumped) for (n, key), dumped in self.dumped.items() if n == number)
