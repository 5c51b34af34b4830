"""Read a dumped array as its stage (named intermediate array): find its tokens and the order of its axes by its shape.

If several orders fit, llorch runs the dump's tokens up to this stage, and the values decide.
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
    declared_form,
    find_nearest_form,
    list_forms,
    normalise,
    sine_distance,
    single_axes,
    split_fused,
)
from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.stage_dump import Defect, DumpedArray
from llorch.engines.dumps.widths import Share, find_padding_maximum, merge_copies, n_heads, other_heads
from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files import Weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import Tokens, heads_axis
from llorch.stages.table import BY_NAME, Stage, axis_sizes, key

_LIKE = 0.1  # largest sine distance (angle, see `sine_distance`) of one stage in different arithmetics


def table_axes(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a stage in `stages.table`; fused projections share one axis, `width`."""
    return tuple(BY_NAME[stages[0]].axes.split()) if len(stages) == 1 else ("seq", "width")


@dataclass(frozen=True)
class NamedArray:
    """Dumped array whose name has been mapped to stages.

    Attributes:
        n_pass: Number of the pass (one call of the forward), from 0.
        array: Array with the engine's shape.
        stages: One stage, or the projections that are fused in the array.
        layer: Number of the layer; None outside the layers.
        layout: Declared layout: axes, factor, pairs of RoPE, fused rows.
        by_llamacpp: True if the name is llama.cpp's name of a node.
    """

    n_pass: int
    array: RawArray
    stages: tuple[str, ...]
    layer: int | None
    layout: DumpLayout
    by_llamacpp: bool = False

    @property
    def keys(self) -> list[str]:
        """Stage keys of the array."""
        return [key(stage, self.layer) for stage in self.stages]

    @property
    def table(self) -> tuple[str, ...]:
        """Axes of the stages in the table."""
        return table_axes(self.stages)

    @property
    def declared_axes(self) -> tuple[str, ...]:
        """Axes declared by the user, or else by the dump."""
        return self.layout.axes or self.array.axes


@dataclass(frozen=True)
class ArrayReading:
    """One way to read an array: its tokens in the pass (None: all), and the order and sizes of its axes (`form`)."""

    tokens: tuple[int, ...] | None
    form: Form
    sizes: dict[str, int]  # size of each axis of the stage
    n_tokens: int  # tokens of the pass up to the array's last key
    config: ModelConfig  # of which the array has all heads
    n_dropped: int = 0  # number of the oldest keys that a window dropped
    n_missing: int = 0  # number of the oldest keys that the array of scores lacks, although its queries saw them
    n_later: int = 0  # number of keys after the array's tokens, which it lacks
    share: Share | None = None  # heads that the array has; None for all

    @property
    def has_all_keys(self) -> bool:
        """True if the array has no padded keys beyond the context."""
        sizes = zip(self.form.axes, self.form.sizes, strict=True)
        return all(size == self.sizes[axis] for axis, size in sizes if axis == "ctx")

    def select(self, llorch_x: np.ndarray, table: tuple[str, ...]) -> np.ndarray:
        """Select the tokens and keys of llorch's array that the dumped array has."""
        if self.tokens is not None:
            llorch_x = llorch_x.take(self.tokens, axis=table.index("seq"))
        return llorch_x[:, self.n_dropped :] if table[1] == "ctx" else llorch_x[..., self.n_missing :]


class StageReader:
    """Reader of stages; all layers and passes with equal candidate forms get the form that the first array got."""

    def __init__(
        self, config: ModelConfig, passes: tuple[Tokens, ...], weights: Weights | None, n_before: int = 0,
        share: Share | None = None,
    ) -> None:  # fmt: skip
        """Prepare to read passes with one cache, which held `n_before` tokens; without weights, compare no values.

        `share`: declared rank of the engine, whose arrays may have its heads only.
        """
        self.config, self.passes, self.weights, self._n_before = config, passes, weights, n_before
        self._share = share
        self.defects: list[Defect] = []  # see `StageDump`
        self._chosen_forms: dict[tuple, Form] = {}
        self._in_pairs: bool | None = None  # llama.cpp's nodes have RoPE pairs as neighbours; None: not known yet
        self._last_only: list[str] = []
        self._by_shape: dict[str, Form] = {}
        self._latest_run: tuple[tuple[int, str], np.ndarray] | None = None  # llorch's array of a pass and stage key
        self._notes: list[str] = []
        self._heads: dict[str, str] = {}  # stage -> heads of a share
        self._copied: dict[str, None] = {}  # stages whose KV heads are repeated

    def notes(self) -> list[str]:
        """Return notes on detected axes, and on arrays that hold only the last token."""
        notes = [*self._notes]
        if self._by_shape:
            stage_forms = "; ".join(f"{stage} is {form}" for stage, form in self._by_shape.items())
            notes.append(f"llorch found the order of the axes by their sizes: {stage_forms}")
        if self._last_only:
            notes.append(f"one row, read as the row of the last token: {', '.join(self._last_only)}")
        if self._copied:
            notes.append(
                f"{', '.join(self._copied)}: each KV head is there {self.config.group_size} times, once for every "
                "query head that reads it; llorch compares one of the equal copies"
            )
        if self._heads and self._share is not None:
            heads = ", ".join(f"{stage} {span}" for stage, span in self._heads.items())
            notes.append(
                f"the arrays of rank {self._share.rank} of {self._share.n} have its heads only: {heads}; llorch "
                "compares these, and expects outputs of o_proj and down_proj after the all-reduce"
            )
        return notes

    def dumped(self, named: NamedArray) -> dict[str, DumpedArray]:
        """Return an array as its stages, whose values are read on demand; FormatError if no form fits its shape."""
        read = self._read(named)
        if "seq" in named.table and named.array.tokens is None and read.tokens is not None:
            self._last_only.append(named.array.name)
        is_interleaved = named.by_llamacpp and FAMILIES[self.config.family].layout.interleaved_rope == "gguf"
        if is_interleaved and named.stages[0] in PAIRED:
            paired = replace(named, layout=replace(named.layout, permuted=True))
            named = paired if self._has_pairs(named, paired, read) else named
        name, dtype = named.array.name, named.array.stored
        has_newest = read.n_missing or (read.n_dropped and named.table[1] == "ctx")
        keys = read.sizes["ctx"] if has_newest else None
        return {
            stage: DumpedArray(
                name, dtype, lambda stage=stage: self.arrays(named, read)[stage], read.tokens, keys,
                None if read.share is None else read.share.elements(BY_NAME[stage], self.config),
                named.layout.permuted or named.layout.tiled,
            )
            for stage in named.stages
        }  # fmt: skip

    def _read(self, named: NamedArray) -> ArrayReading:
        """Choose the reading of an array, and note another width than its stage's; FormatError if none fits."""
        try:
            readings = self.readings(named)
        except FormatError as error:
            read = None if error.code != "Shape" else self._read_other_heads(named) or self._read_newest_keys(named)
            if read is None:
                raise
            return read
        read = readings[0] if len(readings) == 1 else self._choose(named, readings)
        if len(readings) == 1 and not named.declared_axes and read.form.differs_from(named.table):
            self._by_shape.setdefault(" ".join(named.stages), read.form)
        if named.stages == ("logits",):
            self._check_padding(named, read)
        return read

    def readings(self, named: NamedArray, config: ModelConfig | None = None) -> list[ArrayReading]:
        """List all readings of an array that its declaration or shape allows; raise FormatError if there is none.

        If the dump does not declare tokens, a single row is the row of the last token. `config` has another number of
        heads, see `widths.other_heads`.
        """
        errors = []
        for tokens in self._possible_tokens(named):
            try:
                return self._readings_with_tokens(named, tokens, config or self.config)
            except FormatError as error:
                errors.append(error)
        raise errors[0]

    def _possible_tokens(self, named: NamedArray) -> list[tuple[int, ...] | None]:
        """List the tokens that an array may have, None for all; raise FormatError if the declared ones do not exist."""
        n_tokens, declared = len(self.passes[named.n_pass].ids), named.array.tokens
        if "seq" not in named.table or declared == tuple(range(n_tokens)):
            return [None]
        if declared is None:
            return [None, (n_tokens - 1,)]
        if not declared or not all(0 <= token < n_tokens for token in declared):
            raise FormatError("OutOfRange", f"tokens: expected 0 to {n_tokens - 1}, got {declared}")
        return [declared]

    def _n_keys(self, named: NamedArray) -> int:
        """Count the keys of the whole context of an array's pass."""
        return self._n_before + sum(len(earlier.ids) for earlier in self.passes[: named.n_pass + 1])

    def _readings_with_tokens(
        self, named: NamedArray, tokens: tuple[int, ...] | None, config: ModelConfig
    ) -> list[ArrayReading]:
        """List the readings of an array with these tokens, and with all keys, those they see, or a window's newest."""
        n_keys = self._n_keys(named)
        try:
            return self._readings_in(named, tokens, n_keys, config)
        except FormatError:
            n_later = 0 if tokens is None else len(self.passes[named.n_pass].ids) - 1 - max(tokens)
            ends = [(n_later, 0)] if n_later and named.table[-1] == "ctx" else []
            ends += [(0, n_keys - n_newest) for n_newest in self._possible_key_counts(named, tokens, n_keys)]
            for n_after, n_dropped in ends:
                with suppress(FormatError):
                    readings = self._readings_in(named, tokens, n_keys - n_after - n_dropped, config)
                    if exact := [read for read in readings if read.has_all_keys]:
                        return [
                            replace(read, n_dropped=n_dropped, n_later=n_after, n_tokens=read.n_tokens - n_after)
                            for read in exact
                        ]
            raise

    def _possible_key_counts(self, named: NamedArray, tokens: tuple[int, ...] | None, n_keys: int) -> list[int]:
        """List the sizes of an array that may be its number of keys, if its layer has a window or chunks.

        Scores of several tokens have all keys in the window of one of them, or each row has keys of its own.
        """
        bound = None if named.layer is None else self.config.layer(named.layer).bound
        if "ctx" not in named.table or bound is None:
            return []
        n_rows = len(self.passes[named.n_pass].ids) - min(tokens or (0,))
        has_rows = named.table[-1] == "ctx" and bound[0] == "window" and n_rows > 1
        least = bound[1] + n_rows - 1 if has_rows else 1
        return sorted({size for size in named.array.shape if least <= size < n_keys}, reverse=True)

    def _readings_in(
        self, named: NamedArray, tokens: tuple[int, ...] | None, ctx: int, config: ModelConfig
    ) -> list[ArrayReading]:
        """List the readings of an array in a context of `ctx` tokens; raise FormatError if no form fits its shape."""
        n_tokens = len(self.passes[named.n_pass].ids)
        seq = n_tokens if tokens is None else len(tokens)
        widths = [BY_NAME[stage].shape(config, seq=seq, ctx=ctx)[-1] for stage in named.stages]
        sizes = axis_sizes(config, seq=seq, ctx=ctx) | {"width": sum(widths)}
        shape, declared = named.array.shape, named.declared_axes
        if declared:
            form = declared_form(declared, named.table, shape, sizes)
            return [ArrayReading(tokens, form, sizes, n_tokens, config)]
        forms = list_forms(named.table, shape, sizes)
        if not forms:
            expected = " ".join(f"{axis}={math.prod(sizes[a] for a in single_axes([axis]))}" for axis in named.table)
            advice = "check that model and tokens belong to this run"
            if math.prod(shape) == math.prod(sizes[axis] for axis in single_axes(named.table)):
                advice = f"give axes under [layout.{named.stages[0]}]"
            raise FormatError("Shape", f"expected {expected}, in any order of the axes, got {shape}; {advice}")
        return [ArrayReading(tokens, form, sizes, n_tokens, config) for form in forms]

    def _check_padding(self, named: NamedArray, read: ArrayReading) -> None:
        """Note columns of logits after the vocabulary, and record a defect if one of them has a row's largest logit."""
        n_columns, n_tokens = self.config.vocab_size, len(self.passes[named.n_pass].ids)
        width = read.form.sizes[read.form.axes.index("vocab")]
        if width == n_columns:
            return
        self._notes.append(f"the logits have {width} columns: those from {n_columns} on are padding, and not compared")
        rows = read.form.arrange(named.array.read(), named.table, read.sizes | {"vocab": width})
        if (maximum := find_padding_maximum(rows, n_columns)) is not None:
            row, column, n_rows = maximum
            token = range(n_tokens)[row] if read.tokens is None else read.tokens[row]
            place = f"pass {named.n_pass}, row {token}" if len(self.passes) > 1 else f"row {token}"
            count = f" ({n_rows} of {len(rows)} rows)" if len(rows) > 1 else ""
            sentence = f"{place}: the largest logit is padding column {column}{count}"
            advice = f"mask the columns from {n_columns} on"
            self.defects.append(Defect(named.n_pass, named.stages[0], f"{sentence}; {advice}."))

    def _read_other_heads(self, named: NamedArray) -> ArrayReading | None:
        """Read an array with a rank's share of the heads, or with repeated KV heads; None if it has neither.

        Raise FormatError if copies of a KV head differ, or the rank is not known.
        """
        if any(heads_axis(BY_NAME[stage]) is None for stage in named.stages):
            return None
        errors = []
        for config in other_heads(self.config):
            try:
                readings = self.readings(named, config)
            except FormatError:
                continue
            try:
                if config.n_heads < self.config.n_heads:
                    return self._choose_share(named, readings, self.config.n_heads // config.n_heads)
                self.arrays(named, readings[0])  # raises FormatError if copies differ
            except FormatError as error:
                errors.append(error)
            else:
                self._copied |= dict.fromkeys(stage for stage in named.stages if "kv_" in BY_NAME[stage].axes)
                return readings[0]
        if errors:
            raise errors[0]
        return None

    def _choose_share(self, named: NamedArray, readings: Sequence[ArrayReading], n_shares: int) -> ArrayReading:
        """Choose the rank whose heads an array has: the declared or an earlier array's rank, or else by values."""
        shares = [Share(rank, n_shares) for rank in range(n_shares)]
        shares = [share for share in shares if self._share is None or share.overlaps(self._share)]
        candidates = {share: [replace(read, share=share) for read in readings] for share in shares}
        share = shares[0]
        if len(shares) > 1:
            can_compare = self.weights is not None and not (self._n_before and "ctx" in named.table)
            distances = {
                share: min(sine_distance(*self._read_both(named, read)) for read in share_readings)
                for share, share_readings in candidates.items()
            } if can_compare else {}  # fmt: skip
            nearest = find_nearest_form(distances) if distances else None
            if nearest is None:
                raise FormatError("Shape", self._describe_shares(named, shares))
            share = nearest
        if self._share is None or share.n > self._share.n:
            self._share = share
        for stage in named.stages:
            first, stop = share.heads(BY_NAME[stage], self.config)
            self._heads.setdefault(stage, f"{first} to {stop - 1}" if stop > first + 1 else f"{first}")
        return candidates[share][0] if len(readings) == 1 else self._choose(named, candidates[share])

    def _describe_shares(self, named: NamedArray, shares: Sequence[Share]) -> str:
        """Explain that the values of an array do not tell which heads it has."""
        stage = BY_NAME[named.stages[0]]
        spans = [share.heads(stage, self.config) for share in shares]
        choices = " or ".join(f"{first} to {stop - 1}" for first, stop in spans)
        size = spans[0][1] - spans[0][0]
        return (
            f"expected {n_heads(stage, self.config)} heads, got {size}: heads {choices}, and the values do not tell "
            f'which; give rank = "0/{shares[0].n}" under [run], with the number of the rank'
        )

    def _read_newest_keys(self, named: NamedArray) -> ArrayReading | None:
        """Read scores or probabilities that lack the oldest keys if their values are llorch's for the newest."""
        if named.table[-1] != "ctx" or self.weights is None or self._n_before:
            return None
        n_keys = self._n_keys(named)
        for tokens in self._possible_tokens(named):
            for n_newest in sorted({size for size in named.array.shape if size < n_keys}, reverse=True):
                with suppress(FormatError):
                    for read in self._readings_in(named, tokens, n_newest, self.config):
                        read = replace(read, n_missing=n_keys - n_newest)
                        if read.has_all_keys and sine_distance(*self._read_both(named, read)) <= _LIKE:
                            n_of = f"{n_newest} of {n_keys}"
                            self._notes.append(f"{named.array.name} has the newest {n_of} keys: llorch compares these")
                            return read
        return None

    def _choose(self, named: NamedArray, readings: list[ArrayReading]) -> ArrayReading:
        """Choose the reading whose values are far nearer to llorch's than all others, or else the table's order."""
        forms = [read.form for read in readings]
        choice_key = (named.stages, *forms)
        if choice_key not in self._chosen_forms:
            nearest = self._nearest(named, readings)
            self._chosen_forms[choice_key] = nearest or forms[0]
            if nearest != forms[0]:
                reason = "by its values" if nearest else "as in the stage table, because the values do not decide"
                self._notes.append(
                    f"{' '.join(named.stages)} ({named.array.name}, {named.array.shape}) is read as "
                    f"{self._chosen_forms[choice_key]}, {reason}; {len(forms) - 1} other orders of the axes would fit, "
                    f"to choose, give axes under [layout.{named.stages[0]}]"
                )
        return readings[forms.index(self._chosen_forms[choice_key])]

    def _nearest(self, named: NamedArray, readings: Iterable[ArrayReading]) -> Form | None:
        """Return the form whose values are far nearer to llorch's than all others; None if there is none.

        If the elements do not decide, compare norms of rows, which a wrong rotation does not change.
        """
        if self.weights is None or self._n_before:
            return None
        arrays = {read.form: self._read_both(named, read) for read in readings}
        by_elements = {form: sine_distance(*pair) for form, pair in arrays.items()}
        by_norms = {form: sine_distance(*(np.linalg.norm(a, axis=-1) for a in pair)) for form, pair in arrays.items()}
        return find_nearest_form(by_elements) or find_nearest_form(by_norms)

    def _has_pairs(self, named: NamedArray, paired: NamedArray, read: ArrayReading) -> bool:
        """Check, once per dump, if llama.cpp's nodes have RoPE pairs as neighbours, like its files.

        Assume so unless only the unpermuted values match llorch's. `paired` is `named`, declared with such pairs.
        """
        if self._in_pairs is None:
            self._in_pairs = True
            if self.weights is not None and not self._n_before:
                distance, paired_distance = (sine_distance(*self._read_both(array, read)) for array in (named, paired))
                self._in_pairs = paired_distance <= _LIKE or distance > _LIKE
            order = "neighbours, as in GGUF files" if self._in_pairs else "halves, by the values"
            self._notes.append(f"{named.array.name} is a node of llama.cpp: llorch reads the RoPE pairs as {order}")
        return self._in_pairs

    def _read_both(self, named: NamedArray, read: ArrayReading) -> tuple[np.ndarray, np.ndarray]:
        """Read an array in one way, and compute llorch's array for the same tokens and keys."""
        assert self.weights is not None
        stage = BY_NAME[named.stages[0]]
        run_key = named.n_pass, key(stage.name, named.layer)
        if self._latest_run is None or self._latest_run[0] != run_key:
            self._latest_run = run_key, run_stage(self.weights, self.passes, *run_key)
        llorch_x = self._latest_run[1]
        if read.share is not None:
            llorch_x = llorch_x.take(range(*read.share.elements(stage, self.config)), axis=heads_axis(stage))
        return self.arrays(named, read)[stage.name], read.select(llorch_x, named.table)

    def has_all_keys(self, named: NamedArray) -> bool:
        """Check if an array has exactly the keys of the context, or of a window in it."""
        try:
            return any(reading.has_all_keys for reading in self.readings(named))
        except FormatError:
            return False

    def has_later_keys(self, named: NamedArray) -> bool:
        """Check if a cache has nonzero keys after as many slots as the first pass has tokens: earlier tokens' keys."""
        if named.table[1] != "ctx":
            return False
        try:
            (array,) = self.arrays(named, self.readings(named)[0]).values()
        except FormatError:
            return False
        return bool(array[:, len(self.passes[0].ids) :].any())

    def arrays(self, named: NamedArray, read: ArrayReading) -> dict[str, np.ndarray]:
        """Read the stages of an array as float32 or float64."""
        dumped = named.array.read()
        floats = dumped.astype(np.float64 if dumped.dtype == np.float64 else np.float32, copy=False)
        array = read.form.arrange(floats, single_axes(named.table), read.sizes)
        first, *more_stages = named.stages
        parts = split_fused(array, named.stages, named.layout.fused, read.config) if more_stages else {first: array}
        seq, ctx = read.sizes["seq"], read.sizes["ctx"]
        rows = np.arange(seq) if read.tokens is None else np.array(read.tokens)
        hidden = self._hidden_keys(named, rows, ctx, rows + ctx - read.n_tokens)
        arrays = {}
        for name, part in parts.items():
            stage = BY_NAME[name]
            part = part.reshape(stage.shape(read.config, seq=seq, ctx=ctx))
            if read.config.n_kv_heads > self.config.n_kv_heads and "kv_" in stage.axes:
                part = merge_copies(part, stage, self.config)
            arrays[name] = _pad_keys(normalise(part, stage, named.layout, self.config, hidden), stage, read)
        return arrays

    def _hidden_keys(self, named: NamedArray, rows: np.ndarray, ctx: int, own_keys: np.ndarray) -> np.ndarray:
        """Mark the keys that tokens do not see, (tokens, ctx): those after them, before their window or chunk.

        `own_keys` are the indices of the tokens among the `ctx` keys.
        """
        keys, positions = np.arange(ctx), self.passes[named.n_pass].first_position + rows
        hidden = keys > own_keys[:, None]
        first = None if named.layer is None else self.config.layer(named.layer).seen_from(positions)
        return hidden if first is None else hidden | (keys < (first - positions + own_keys)[:, None])


def _pad_keys(array: np.ndarray, stage: Stage, read: ArrayReading) -> np.ndarray:
    """Pad scores and probabilities to the whole context with masked keys, where a window or the mask left none."""
    if not (read.n_dropped or read.n_later) or stage.axes.split()[-1] != "ctx":
        return array
    filled = -np.inf if stage.masked else 0
    return np.pad(array, [(0, 0), (0, 0), (read.n_dropped, read.n_later)], constant_values=filled)


def count_earlier_tokens(named: Sequence[NamedArray], passes: tuple[Tokens, ...], config: ModelConfig) -> int | None:
    """Find how many tokens were cached before the first pass, from its numbers of keys; None if no array has keys.

    A first position above 0 does not tell: the engine may have run the earlier tokens, or none.
    """
    first = passes[0].first_position
    if not first:
        return 0
    with_keys = [array for array in named if array.n_pass == 0 and "ctx" in array.table]
    for n_before in (0, first):
        reader = StageReader(config, passes, None, n_before)
        if any(reader.has_all_keys(array) for array in with_keys):
            return n_before
    reader = StageReader(config, passes, None, first)
    if any(reader.has_later_keys(array) for array in with_keys):
        return first
    return 0 if with_keys else None


class _RunEnded(Exception):
    """Raised to end a run after the last stage that is needed."""


def run_passes(weights: Weights, passes: Sequence[Tokens], observe: Callable[[int, str, np.ndarray], bool]) -> None:
    """Run passes one after the other with one cache until `observe`, called with every stage, returns False."""
    first, rounding = passes[0].first_position, weights.cache_rounding
    cache = KVCache(weights.config, weights.dtype, first_position=first, rounding=rounding)

    def keep(number: int, name: str, array: np.ndarray) -> np.ndarray:
        if not observe(number, name, array):
            raise _RunEnded
        return array

    with suppress(_RunEnded):
        for number, tokens in enumerate(passes):
            forward(np.array(tokens.ids), weights, cache, keep=partial(keep, number))


def run_stage(weights: Weights, passes: Sequence[Tokens], n_pass: int, key: str) -> np.ndarray:
    """Run llorch up to one stage (`key`, like `l0.q_rope`) of one pass, and return its array."""
    observed: list[np.ndarray] = []

    def observe(number: int, name: str, array: np.ndarray) -> bool:
        observed.extend([array.copy()] if (number, name) == (n_pass, key) else [])
        return not observed

    run_passes(weights, passes, observe)
    return observed[0]
