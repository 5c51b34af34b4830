"""Arrays as they lie in a dump, under the names of the engine that wrote them; nothing is interpreted yet."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llorch.engines.dumps.stage_dump import Features
from llorch.stages.stage_ref import Tokens


@dataclass(frozen=True)
class RawArray:
    """One array of a dump.

    Attributes:
        name: As the engine calls it, with the layer where that is a part of the name.
        stored: Its dtype, `float32`, `bfloat16` ...
        shape: As stored.
        read: Gives it; bfloat16 as float32 of the same values.
        layer: As declared beside the name, or None.
        tokens: Which tokens of the pass it has, counted from 0; None where nothing is said.
        axes: Names of its axes where they are declared, of `Stage.axes` or `batch`.
        op: The operation that made it, where the engine says so (`MUL_MAT` of ggml).
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    layer: int | None = None
    tokens: tuple[int, ...] | None = None
    axes: tuple[str, ...] = ()
    op: str = ""


@dataclass(frozen=True)
class RawDump:
    """A dump.

    Attributes:
        source: What it was read from, for messages.
        arrays: In the order they were written; each with the number of its pass.
        passes: Tokens of the passes; none where the dump does not say.
        features: What the engine says of itself.
        weights: `digest` of decoded tensors, by the engine's names.
        notes: What was found amiss and read around, one sentence each.
    """

    source: str
    arrays: tuple[tuple[int, RawArray], ...]
    passes: tuple[Tokens, ...] = ()
    features: Features = field(default_factory=Features)
    weights: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def digest(array: np.ndarray) -> str:
    """Hash an array as float32 with SHA-256: little-endian, in the order of its axes, the last one fastest."""
    return hashlib.sha256(np.ascontiguousarray(array, "<f4").data).hexdigest()


def with_earlier(raw: RawDump, ids: Sequence[int] | None) -> RawDump:
    """Put the passes that a dump lacks before its own, as one without arrays, where `ids` are those of the whole text.

    A dump whose first pass begins behind position 0 lacks them. Any other dump stays as it is.
    """
    shown = [token for tokens in raw.passes for token in tokens.ids]
    n_earlier = len(ids or ()) - len(shown)
    if not ids or n_earlier < 1 or not shown:
        return raw
    if raw.passes[0].first_position != n_earlier or [*ids[n_earlier:]] != shown:
        return raw
    arrays = tuple((number + 1, array) for number, array in raw.arrays)
    return replace(raw, arrays=arrays, passes=(Tokens(tuple(ids[:n_earlier])), *raw.passes))
