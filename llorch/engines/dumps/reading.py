"""Find the tokens and the order of axes of an array from its shape, and read it as its stage.

llorch runs the tokens of a dump only as far as its values are needed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llorch.engines.dumps.layout import (
    PAIRED,
    DumpLayout,
    Form,
    cut,
    declared_form,
    far_nearest,
    finished,
    fitting_forms,
    single_axes,
    unlike,
)
from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.stage_dump import DumpedArray
from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files import Weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, axis_sizes, key

_LIKE = 0.1  # arrays that differ by less are the same array in another arithmetic


def table_axes(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a stage in the table; fused projections share one axis, `width`."""
    return tuple(BY_NAME[stages[0]].axes.split()) if len(stages) == 1 else ("seq", "width")


@dataclass(frozen=True)
class NamedArray:
    """An array whose name stands for stages.

    Attributes:
        n_pass: Its pass.
        array: As it lies there.
        stages: One, or the projections that are fused in it.
        layer: None outside the layers.
        layout: What is declared of it.
        by_llamacpp: Whether it is called as a node of llama.cpp.
    """

    n_pass: int
    array: RawArray
    stages: tuple[str, ...]
    layer: int | None
    layout: DumpLayout
    by_llamacpp: bool = False

    @property
    def table(self) -> tuple[str, ...]:
        """Axes of the array if they are those of the stage table."""
        return table_axes(self.stages)

    @property
    def declared_axes(self) -> tuple[str, ...]:
        """Axes that the user declares, or else the dump."""
        return self.layout.axes or self.array.axes


@dataclass(frozen=True)
class ArrayReading:
    """How an array is read: its rows are those tokens of its pass, None for all, and its axes have this form."""

    tokens: tuple[int, ...] | None
    form: Form
    sizes: dict[str, int]
    n_tokens: int  # of the pass
    left_out: int = 0  # of the oldest keys of the context

    @property
    def has_all_keys(self) -> bool:
        """Tell if the array has no keys beyond the context."""
        sizes = zip(self.form.axes, self.form.sizes, strict=True)
        return all(n == self.sizes[axis] for axis, n in sizes if axis == "ctx")

    def same_of(self, ours: np.ndarray, table: tuple[str, ...]) -> np.ndarray:
        """Select the tokens and keys of llorch's array that this array has."""
        if self.tokens is not None:
            return ours.take(self.tokens, axis=table.index("seq"))
        return ours[:, self.left_out :] if table[1] == "ctx" else ours


class StageReader:
    """Decides for a stage once: what holds in one layer and pass holds in all."""

    def __init__(
        self, config: ModelConfig, passes: tuple[Tokens, ...], weights: Weights | None, n_before: int = 0
    ) -> None:
        """Read passes into one cache, which held `n_before` tokens; without weights no value decides anything."""
        self.config, self.passes, self.weights, self._n_before = config, passes, weights, n_before
        self._decided: dict[tuple, Form] = {}
        self._in_pairs: bool | None = None  # whether llama.cpp's nodes have the pairs of its files
        self._last_only: list[str] = []
        self._by_shape: dict[str, Form] = {}
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """List which axes were found by their sizes, and which arrays hold only the last token."""
        notes = [*self._notes]
        if self._by_shape:
            found = "; ".join(f"{stage} is {form}" for stage, form in self._by_shape.items())
            notes.append(f"llorch found the order of the axes by their sizes: {found}")
        if self._last_only:
            notes.append(f"one row, read as the row of the last token: {', '.join(self._last_only)}")
        return notes

    def dumped(self, named: NamedArray) -> dict[str, DumpedArray]:
        """Find the stages of an array, to be read later; raise FormatError if it does not fit."""
        ways = self.ways(named)
        read = ways[0] if len(ways) == 1 else self._decide(named, ways)
        if len(ways) == 1 and not named.declared_axes and read.form.differs_from(named.table):
            self._by_shape.setdefault(" ".join(named.stages), read.form)
        if "seq" in named.table and named.array.tokens is None and read.tokens is not None:
            self._last_only.append(named.array.name)
        is_interleaved = named.by_llamacpp and FAMILIES[self.config.family].layout.interleaved_rope == "gguf"
        if is_interleaved and named.stages[0] in PAIRED:
            paired = replace(named, layout=replace(named.layout, permuted=True))
            named = paired if self._has_pairs(named, paired, read) else named
        name, stored = named.array.name, named.array.stored
        keys = read.sizes["ctx"] if read.left_out and named.table[1] == "ctx" else None
        return {
            stage: DumpedArray(name, stored, lambda stage=stage: self.arrays(named, read)[stage], read.tokens, keys)
            for stage in named.stages
        }

    def ways(self, named: NamedArray) -> list[ArrayReading]:
        """List all ways to read an array, as declared or as its shape allows; raise FormatError if there is none.

        If the dump does not state tokens, a single row is the row of the last token.
        """
        n_tokens, given = len(self.passes[named.n_pass].ids), named.array.tokens
        if "seq" not in named.table or given == tuple(range(n_tokens)):
            return self._ways_of(named, None)
        if given is not None:
            if not given or not all(0 <= token < n_tokens for token in given):
                raise FormatError("OutOfRange", f"tokens: expected 0 to {n_tokens - 1}, got {given}")
            return self._ways_of(named, given)
        try:
            return self._ways_of(named, None)
        except FormatError as error:
            try:
                return self._ways_of(named, (n_tokens - 1,))
            except FormatError:
                raise error from None

    def _ways_of(self, named: NamedArray, tokens: tuple[int, ...] | None) -> list[ArrayReading]:
        """Find the readings of an array with these tokens, and all keys of the context or the newest of a window."""
        whole = self._n_before + sum(len(each.ids) for each in self.passes[: named.n_pass + 1])
        try:
            return self._ways_in(named, tokens, whole)
        except FormatError:
            for n_keys in self._newest(named, whole):
                with suppress(FormatError):
                    ways = [replace(way, left_out=whole - n_keys) for way in self._ways_in(named, tokens, n_keys)]
                    if exact := [way for way in ways if way.has_all_keys]:
                        return exact
            raise

    def _newest(self, named: NamedArray, whole: int) -> list[int]:
        """List the numbers of keys that a layer with a window or chunks may keep, by the shape of an array."""
        if "ctx" not in named.table or named.layer is None or self.config.layer(named.layer).bound is None:
            return []
        return sorted({n for n in named.array.shape if n < whole}, reverse=True)

    def _ways_in(self, named: NamedArray, tokens: tuple[int, ...] | None, ctx: int) -> list[ArrayReading]:
        """Find the readings of an array in a context of `ctx` tokens; FormatError if its shape fits none."""
        n_tokens = len(self.passes[named.n_pass].ids)
        seq = n_tokens if tokens is None else len(tokens)
        widths = [BY_NAME[stage].shape(self.config, seq=seq, ctx=ctx)[-1] for stage in named.stages]
        sizes = axis_sizes(self.config, seq=seq, ctx=ctx) | {"width": sum(widths)}
        shape, declared = named.array.shape, named.declared_axes
        if declared:
            return [ArrayReading(tokens, declared_form(declared, named.table, shape, sizes), sizes, n_tokens)]
        forms = fitting_forms(named.table, shape, sizes)
        if not forms:
            expected = " ".join(f"{axis}={math.prod(sizes[a] for a in single_axes([axis]))}" for axis in named.table)
            advice = f"give axes under [layout.{named.stages[0]}], or check that model and tokens belong to this run"
            raise FormatError("Shape", f"expected {expected}, in any order of the axes, got {shape}; {advice}")
        return [ArrayReading(tokens, form, sizes, n_tokens) for form in forms]

    def _decide(self, named: NamedArray, ways: list[ArrayReading]) -> ArrayReading:
        """Choose the reading whose values are far nearer to llorch's than all others, else the table's order."""
        forms = [read.form for read in ways]
        told = (named.stages, *forms)
        if told not in self._decided:
            nearest = self._nearest(named, ways)
            self._decided[told] = nearest or forms[0]
            if nearest != forms[0]:
                how = "by its values" if nearest else "as in the stage table, because the values do not decide"
                self._notes.append(
                    f"{' '.join(named.stages)} ({named.array.name}, {named.array.shape}) is read as "
                    f"{self._decided[told]}, {how}; {len(forms) - 1} other orders of the axes would fit, "
                    f"to choose, give axes under [layout.{named.stages[0]}]"
                )
        return ways[forms.index(self._decided[told])]

    def _nearest(self, named: NamedArray, ways: Iterable[ArrayReading]) -> Form | None:
        """Find the form nearest to llorch's values by elements.

        If elements do not decide, compare sizes of rows, which a wrong rotation does not change.
        """
        if self.weights is None or self._n_before:
            return None
        arrays = {read.form: self._beside_ours(named, read) for read in ways}
        by_elements = {form: unlike(*both) for form, both in arrays.items()}
        by_sizes = {form: unlike(*(np.linalg.norm(a, axis=-1) for a in both)) for form, both in arrays.items()}
        return far_nearest(by_elements) or far_nearest(by_sizes)

    def _has_pairs(self, named: NamedArray, paired: NamedArray, read: ArrayReading) -> bool:
        """Check if llama.cpp's nodes have the RoPE pairs of GGUF files.

        They do, unless the values match llorch's without a change.
        """
        if self._in_pairs is None:
            self._in_pairs = True
            if self.weights is not None and not self._n_before:
                as_is, turned = (unlike(*self._beside_ours(each, read)) for each in (named, paired))
                self._in_pairs = turned <= _LIKE or as_is > _LIKE
            order = "neighbours, as in GGUF files" if self._in_pairs else "halves, by the values"
            self._notes.append(f"{named.array.name} is a node of llama.cpp: llorch reads the RoPE pairs as {order}")
        return self._in_pairs

    def _beside_ours(self, named: NamedArray, read: ArrayReading) -> tuple[np.ndarray, np.ndarray]:
        """Read an array in one way, and compute the same rows in llorch's run."""
        assert self.weights is not None
        stage = BY_NAME[named.stages[0]]
        ours = our_stage(self.weights, self.passes, named.n_pass, key(stage.name, named.layer))
        return self.arrays(named, read)[stage.name], read.same_of(ours, named.table)

    def has_all_keys(self, named: NamedArray) -> bool:
        """Tell if an array has exactly the keys of the context, or of a window in it."""
        try:
            return any(way.has_all_keys for way in self.ways(named))
        except FormatError:
            return False

    def has_later_keys(self, named: NamedArray) -> bool:
        """Tell if a cache with room for more keys than the pass has tokens holds numbers after these."""
        if named.table[1] != "ctx":
            return False
        try:
            (array,) = self.arrays(named, self.ways(named)[0]).values()
        except FormatError:
            return False
        return bool(array[:, len(self.passes[0].ids) :].any())

    def arrays(self, named: NamedArray, read: ArrayReading) -> dict[str, np.ndarray]:
        """Read the stages of an array now, as float32 or float64."""
        stored = named.array.read()
        wide = stored.astype(np.float64 if stored.dtype == np.float64 else np.float32, copy=False)
        array = read.form.arranged(wide, single_axes(named.table), read.sizes["ctx"])
        stage, *others = named.stages
        parts = cut(array, named.stages, named.layout.fused, self.config) if others else {stage: array}
        seq, ctx = read.sizes["seq"], read.sizes["ctx"]
        rows = np.arange(seq) if read.tokens is None else np.array(read.tokens)
        later = np.arange(ctx) > rows[:, None] + ctx - read.n_tokens  # (tokens, ctx)
        shapes = {stage: BY_NAME[stage].shape(self.config, seq=seq, ctx=ctx) for stage in parts}
        return {
            stage: _with_left_out(
                finished(part.reshape(shapes[stage]), BY_NAME[stage], named.layout, self.config, later), stage, read
            )
            for stage, part in parts.items()
        }


def _with_left_out(array: np.ndarray, stage: str, read: ArrayReading) -> np.ndarray:
    """Widen scores and probabilities to the whole context: keys that a window left out are masked."""
    if not read.left_out or BY_NAME[stage].axes.split()[-1] != "ctx":
        return array
    filled = -np.inf if BY_NAME[stage].masked else 0
    return np.pad(array, [(0, 0), (0, 0), (read.left_out, 0)], constant_values=filled)


def tokens_before(named: Sequence[NamedArray], passes: tuple[Tokens, ...], config: ModelConfig) -> int | None:
    """Count the tokens that the cache held before the first pass, by the keys that its arrays have.

    None where a text that begins at its first position would be shown in the same way.
    """
    first = passes[0].first_position
    if not first:
        return 0
    shown = [each for each in named if each.n_pass == 0 and "ctx" in each.table]
    for n_before in (0, first):
        reader = StageReader(config, passes, None, n_before)
        if any(reader.has_all_keys(each) for each in shown):
            return n_before
    reader = StageReader(config, passes, None, first)
    if any(reader.has_later_keys(each) for each in shown):
        return first
    return 0 if shown else None


class _Enough(Exception):
    """Ends a run behind the last stage that somebody wants."""


def run_passes(weights: Weights, passes: Sequence[Tokens], observe: Callable[[int, str, np.ndarray], bool]) -> None:
    """Run passes one after the other into one cache; `observe` is shown every stage, and says whether to go on."""
    first, rounding = passes[0].first_position, weights.cache_rounding
    cache = KVCache(weights.config, weights.dtype, first_position=first, rounding=rounding)

    def keep(number: int, name: str, array: np.ndarray) -> np.ndarray:
        if not observe(number, name, array):
            raise _Enough
        return array

    with suppress(_Enough):
        for number, tokens in enumerate(passes):
            forward(np.array(tokens.ids), weights, cache, keep=partial(keep, number))


def our_stage(weights: Weights, passes: Sequence[Tokens], n_pass: int, key: str) -> np.ndarray:
    """Compute one stage of one pass; later stages are not computed."""
    found: list[np.ndarray] = []

    def observe(number: int, name: str, array: np.ndarray) -> bool:
        found.extend([array.copy()] if (number, name) == (n_pass, key) else [])
        return not found

    run_passes(weights, passes, observe)
    return found[0]
