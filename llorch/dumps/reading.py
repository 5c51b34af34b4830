"""Which tokens an array has and in which order its axes stand, found from its shape; then it is read as its stage."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from llorch.config import ModelConfig
from llorch.dumps.layout import (
    PAIRED,
    Form,
    Layout,
    cut,
    declared_form,
    far_nearest,
    finished,
    fitting_forms,
    single_axes,
    unlike,
)  # fmt: skip
from llorch.dumps.our_run import our_stage
from llorch.dumps.raw import RawArray
from llorch.dumps.stage_dump import Seen, Tokens
from llorch.errors import FormatError
from llorch.files import Weights
from llorch.stages import BY_NAME, axis_sizes, key

_LIKE = 0.1  # what is unlike ours by less is ours, whatever its arithmetic


def table_axes(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of a stage in the table; projections that are fused have their rows in one."""
    return tuple(BY_NAME[stages[0]].axes.split()) if len(stages) == 1 else ("seq", "width")


@dataclass(frozen=True)
class Named:
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
    layout: Layout
    by_llamacpp: bool = False

    @property
    def table(self) -> tuple[str, ...]:
        """Its axes, were they those of the table."""
        return table_axes(self.stages)

    @property
    def declared_axes(self) -> tuple[str, ...]:
        """By the user, or else by the dump."""
        return self.layout.axes or self.array.axes


@dataclass(frozen=True)
class Read:
    """How an array is read: its rows are those tokens of its pass, None for all, and its axes have this form."""

    tokens: tuple[int, ...] | None
    form: Form
    sizes: dict[str, int]
    n_tokens: int  # of the pass


class Reader:
    """Decides for a stage once: what holds in one layer and pass holds in all."""

    def __init__(self, config: ModelConfig, passes: tuple[Tokens, ...], weights: Weights | None) -> None:
        """Of passes into one cache; without weights nothing is decided by values."""
        self.config, self.passes, self.weights = config, passes, weights
        self._decided: dict[tuple, Form] = {}
        self._in_pairs: bool | None = None  # whether llama.cpp's nodes have the pairs of its files
        self._last_only: list[str] = []
        self._by_shape: dict[str, Form] = {}
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """What was found."""
        notes = [*self._notes]
        if self._by_shape:
            found = "; ".join(f"{stage} is {form}" for stage, form in self._by_shape.items())
            notes.append(f"the order of the axes was found by their sizes: {found}")
        if self._last_only:
            notes.append(f"of one row, read as that of the last token: {', '.join(self._last_only)}")
        return notes

    def seen(self, named: Named) -> dict[str, Seen]:
        """The stages of an array; FormatError where it does not fit."""
        ways = self.ways(named)
        read = ways[0] if len(ways) == 1 else self._decide(named, ways)
        if len(ways) == 1 and not named.declared_axes and read.form.differs_from(named.table):
            self._by_shape.setdefault(" ".join(named.stages), read.form)
        if "seq" in named.table and named.array.tokens is None and read.tokens is not None:
            self._last_only.append(named.array.name)
        if named.by_llamacpp and self.config.family == "llama" and named.stages[0] in PAIRED:
            paired = replace(named, layout=replace(named.layout, permuted=True))
            named = paired if self._has_pairs(named, paired, read) else named
        name, stored = named.array.name, named.array.stored
        return {
            stage: Seen(name, stored, lambda stage=stage: self.arrays(named, read)[stage], read.tokens)
            for stage in named.stages
        }

    def ways(self, named: Named) -> list[Read]:
        """All ways to read an array, as declared or as its shape allows; FormatError where there is none.

        One row, where nothing is said of tokens, is that of the last one.
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

    def _ways_of(self, named: Named, tokens: tuple[int, ...] | None) -> list[Read]:
        """Those of an array that has these tokens."""
        n_tokens = len(self.passes[named.n_pass].ids)
        seq = n_tokens if tokens is None else len(tokens)
        ctx = sum(len(each.ids) for each in self.passes[: named.n_pass + 1])
        widths = [BY_NAME[stage].shape(self.config, seq=seq, ctx=ctx)[-1] for stage in named.stages]
        sizes = axis_sizes(self.config, seq=seq, ctx=ctx) | {"width": sum(widths)}
        shape, declared = named.array.shape, named.declared_axes
        if declared:
            return [Read(tokens, declared_form(declared, named.table, shape, sizes), sizes, n_tokens)]
        forms = fitting_forms(named.table, shape, sizes)
        if not forms:
            expected = " ".join(f"{axis}={math.prod(sizes[a] for a in single_axes([axis]))}" for axis in named.table)
            raise FormatError(
                "Shape",
                f"expected {expected}, in any order of the axes, got {shape}; give axes under "
                f"[layout.{named.stages[0]}], or check that model and tokens are those of the run",
            )
        return [Read(tokens, form, sizes, n_tokens) for form in forms]

    def _decide(self, named: Named, ways: list[Read]) -> Read:
        """The way whose values are far nearer to ours than those of all others; else that of the table."""
        forms = [read.form for read in ways]
        told = (named.stages, *forms)
        if told not in self._decided:
            nearest = self._nearest(named, ways)
            self._decided[told] = nearest or forms[0]
            if nearest != forms[0]:
                how = "by its values" if nearest else "as in the table: values do not tell"
                self._notes.append(
                    f"{' '.join(named.stages)} ({named.array.name}, {named.array.shape}) is read as "
                    f"{self._decided[told]}, {how}; {len(forms) - 1} other orders of the axes would fit, "
                    f"axes under [layout.{named.stages[0]}] decide"
                )
        return ways[forms.index(self._decided[told])]

    def _nearest(self, named: Named, ways: Iterable[Read]) -> Form | None:
        """By elements; where these do not tell, by the sizes of rows, which a wrong rotation leaves as they are."""
        if self.weights is None:
            return None
        arrays = {read.form: self._beside_ours(named, read) for read in ways}
        by_elements = {form: unlike(*both) for form, both in arrays.items()}
        by_sizes = {form: unlike(*(np.linalg.norm(a, axis=-1) for a in both)) for form, both in arrays.items()}
        return far_nearest(by_elements) or far_nearest(by_sizes)

    def _has_pairs(self, named: Named, paired: Named, read: Read) -> bool:
        """Whether llama.cpp's nodes have the pairs of its files; they do, unless the values are ours as they are."""
        if self._in_pairs is None:
            self._in_pairs = True
            if self.weights is not None:
                as_is, turned = (unlike(*self._beside_ours(each, read)) for each in (named, paired))
                self._in_pairs = turned <= _LIKE or as_is > _LIKE
            order = "neighbours, as in its files" if self._in_pairs else "halves, by their values"
            self._notes.append(f"{named.array.name} is a node of llama.cpp: its pairs of RoPE are read as {order}")
        return self._in_pairs

    def _beside_ours(self, named: Named, read: Read) -> tuple[np.ndarray, np.ndarray]:
        """An array as it would be read, and the same rows of our run."""
        assert self.weights is not None
        stage = BY_NAME[named.stages[0]]
        ours = our_stage(self.weights, self.passes, named.n_pass, key(stage.name, named.layer))
        if read.tokens is not None:
            ours = ours.take(read.tokens, axis=stage.axes.split().index("seq"))
        return self.arrays(named, read)[stage.name], ours

    def arrays(self, named: Named, read: Read) -> dict[str, np.ndarray]:
        """The stages of an array, read now, float32 or float64."""
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
            stage: finished(part.reshape(shapes[stage]), BY_NAME[stage], named.layout, self.config, later)
            for stage, part in parts.items()
        }
