"""From arrays under the names of their engine to stages of the table: `stage_dump`."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from llorch.config import ModelConfig
from llorch.dumps.known_names import RAW_SCORES, Meaning, meaning_of
from llorch.dumps.layout import (
    PAIRED,
    Form,
    Layout,
    axis_sizes,
    cut,
    declared_form,
    distance,
    far_nearest,
    finished,
    fitting_forms,
    single_axes,
)  # fmt: skip
from llorch.dumps.mapping import NameMap
from llorch.dumps.our_run import our_stage
from llorch.dumps.raw import RawArray, RawDump
from llorch.dumps.stage_dump import Features, Seen, StageDump, Tokens
from llorch.errors import FormatError
from llorch.files import Weights
from llorch.stages import BY_NAME, Stage, key

_SHOWN_NAMES = 8
_LIKE = 0.1  # of the norm of ours


def stage_dump(
    raw: RawDump,
    config: ModelConfig,
    *,
    mapping: NameMap | None = None,
    ids: Sequence[int] | None = None,
    first_position: int = 0,
    weights: Weights | None = None,
) -> StageDump:
    """Find out which stages the arrays of a dump are, and in which layout; arrays are read later, one by one.

    Args:
        raw: The dump.
        config: Of the model that the engine ran.
        mapping: What the user says of names, layouts and the run.
        ids: Tokens of the only pass, where neither dump nor mapping has them.
        first_position: Of these tokens.
        weights: Of the model; with them our own run decides where a shape fits several orders of the axes.

    Returns:
        The stages; what was found rather than declared is in its notes.

    Raises:
        FormatError: No ids; an array that does not fit its stage; a stage twice; a layer the model does not have.
    """
    mapping = mapping or NameMap()
    passes = _passes(raw, config, mapping, ids, first_position)
    reader = _Reader(raw, config, mapping, passes, weights)
    return StageDump(
        raw.source,
        passes,
        reader.stages(),
        Features(**asdict(raw.features) | mapping.features),  # type: ignore[arg-type] (checked when it was read)
        (*raw.notes, *dict.fromkeys(reader.notes)),
    )


def _passes(
    raw: RawDump, config: ModelConfig, mapping: NameMap, ids: Sequence[int] | None, first_position: int
) -> tuple[Tokens, ...]:
    """The tokens of every pass; whoever says them, they may not contradict each other."""
    told = [("the dump", raw.passes), ("the mapping", mapping.passes)]
    told.append(("the command", (Tokens(tuple(map(int, ids)), first_position),) if ids else ()))
    said = [(who, passes) for who, passes in told if passes]
    if not said:
        raise FormatError(
            "Missing", "ids: expected the token ids of the run, got none; give --ids, or [run] ids in a mapping",
            path=raw.source,
        )  # fmt: skip
    who, passes = said[0]
    for other, others in said[1:]:
        if others != passes:
            raise FormatError("Inconsistent", f"ids: {who} has {passes}, {other} has {others}", path=raw.source)
    n_passes = 1 + max((number for number, _ in raw.arrays), default=0)
    if n_passes > len(passes):
        raise FormatError(
            "Missing", f"ids: expected those of {n_passes} passes, got {len(passes)} from {who}", path=raw.source
        )
    wrong = next((token for tokens in passes for token in tokens.ids if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise FormatError("OutOfRange", f"ids: expected 0 to {config.vocab_size - 1}, got {wrong}", path=raw.source)
    return passes


@dataclass(frozen=True)
class _Named:
    """An array whose name stands for stages of a layer."""

    n_pass: int
    array: RawArray
    stages: tuple[str, ...]
    layer: int | None
    layout: Layout
    by_llamacpp: bool

    @property
    def table(self) -> tuple[str, ...]:
        """Its axes, were they those of the table; projections that are fused have their rows in one."""
        return tuple(BY_NAME[self.stages[0]].axes.split()) if len(self.stages) == 1 else ("seq", "width")


class _Reader:
    """Goes through the arrays once; what was decided of a stage holds for all layers and passes."""

    def __init__(
        self,
        raw: RawDump,
        config: ModelConfig,
        mapping: NameMap,
        passes: tuple[Tokens, ...],
        weights: Weights | None,
    ) -> None:
        self.raw, self.config, self.mapping, self.passes, self.weights = raw, config, mapping, passes, weights
        self.notes: list[str] = []
        self._chosen: dict[tuple, Form] = {}
        self._permuted: bool | None = None  # whether llama.cpp's nodes are in the order of its files

    def stages(self) -> dict[tuple[int, str], Seen]:
        """What was seen, by pass and stage key."""
        found: dict[tuple[int, str], Seen] = {}
        for named in self._named():
            try:
                seen = self._seen(named)
            except FormatError as error:
                message = f"{named.array.name} ({' '.join(named.stages)}): {error.message}"
                raise FormatError(error.code, message, path=self.raw.source) from None
            for stage, one in seen.items():
                place = named.n_pass, key(stage, named.layer)
                if place not in found:
                    found[place] = one
                elif not named.by_llamacpp:
                    self._twice(place, found[place].name, named.array.name)
        return found

    def _twice(self, place: tuple[int, str], first: str, second: str) -> None:
        n_pass, stage = place
        if first == second:
            raise FormatError(
                "Duplicate",
                f"{first}: expected one array in pass {n_pass}, got two; begin a pass for every run of the engine",
                path=self.raw.source,
            )
        self.notes.append(f"{second} is {stage}, as {first} is: left out")

    def _named(self) -> Iterator[_Named]:
        """Arrays that stand for stages; the others go into a note."""
        times = Counter((n_pass, array.name) for n_pass, array in self.raw.arrays)
        before: Counter[tuple[int, str]] = Counter()
        unnamed: list[str] = []
        for n_pass, array in self.raw.arrays:
            place = n_pass, array.name
            mapped = self.mapping.find(array.name, array.layer)
            if mapped is not None:
                meaning, pattern = Meaning(self.mapping.names[mapped[0]], mapped[1]), mapped[0]
            else:
                pattern, counts = None, {"nth": before[place], "of": times[place]}
                meaning = meaning_of(array.name, array.layer, self.config, op=array.op, **counts)
            before[place] += 1
            if meaning is None:
                unnamed.append(array.name)
            elif meaning.stages:
                yield self._checked(n_pass, array, meaning, pattern)
        if unnamed:
            self.notes.append(_list_of_unnamed(unnamed))

    def _checked(self, n_pass: int, array: RawArray, meaning: Meaning, pattern: str | None) -> _Named:
        """With its layout; FormatError where the model has no such stage."""
        stages, n_layers = meaning.stages, self.config.n_layers
        layout = self.mapping.layout(stages[0], pattern) or Layout()
        if stages == (RAW_SCORES,):
            layout = replace(layout, times=layout.times * self.config.head_dim**0.5, masked=False)
            stages = ("attn_scores",)
        in_layer = BY_NAME[stages[0]].in_layer
        if in_layer != (meaning.layer is not None) or (meaning.layer or 0) >= n_layers:
            wanted = f"a layer from 0 to {n_layers - 1}" if in_layer else "no layer"
            raise FormatError(
                "OutOfRange", f"{array.name} ({stages[0]}): expected {wanted}, got {meaning.layer}",
                path=self.raw.source,
            )  # fmt: skip
        if not BY_NAME[stages[0]].applies_to(self.config):
            raise FormatError(
                "Unexpected", f"{array.name}: expected a stage of {self.config.family}, got {stages[0]}",
                path=self.raw.source,
            )  # fmt: skip
        if meaning.assumed:
            self.notes.append(meaning.assumed)
        return _Named(n_pass, array, stages, meaning.layer, layout, meaning.by_llamacpp)

    def _seen(self, named: _Named) -> dict[str, Seen]:
        """Its stages, one or the parts of what is fused."""
        tokens, form = self._tokens_and_form(named)
        if named.by_llamacpp and named.stages[0] in PAIRED and self.config.family == "llama":
            permuted = replace(named, layout=replace(named.layout, permuted=True))
            named = permuted if self._in_pairs(named, permuted, form, tokens) else named

        def read(stage: str) -> np.ndarray:
            return self._read(named, form, tokens)[stage]

        return {
            stage: Seen(named.array.name, named.array.stored, lambda stage=stage: read(stage), tokens)
            for stage in named.stages
        }

    def _tokens_and_form(self, named: _Named) -> tuple[tuple[int, ...] | None, Form]:
        """Which tokens an array has, and in which form; one row alone is that of the last token."""
        n_tokens, array = len(self.passes[named.n_pass].ids), named.array
        if "seq" not in named.table:
            return None, self._form(named, None)
        if array.tokens is not None:
            if not array.tokens or not all(0 <= token < n_tokens for token in array.tokens):
                raise FormatError("OutOfRange", f"tokens: expected 0 to {n_tokens - 1}, got {array.tokens}")
            tokens = None if array.tokens == tuple(range(n_tokens)) else array.tokens
            return tokens, self._form(named, tokens)
        try:
            return None, self._form(named, None)
        except FormatError as error:
            last = (n_tokens - 1,)
            try:
                form = self._form(named, last)
            except FormatError:
                raise error from None
            self.notes.append(f"{array.name} has one row: read as that of the last token")
            return last, form

    def _sizes(self, named: _Named, tokens: tuple[int, ...] | None) -> dict[str, int]:
        ctx = sum(len(each.ids) for each in self.passes[: named.n_pass + 1])
        seq = len(self.passes[named.n_pass].ids) if tokens is None else len(tokens)
        sizes = axis_sizes(self.config, seq=seq, ctx=ctx)
        parts = [BY_NAME[stage].shape(self.config, seq=seq, ctx=ctx) for stage in named.stages]
        return sizes | {"width": sum(shape[-1] for shape in parts)}

    def _form(self, named: _Named, tokens: tuple[int, ...] | None) -> Form:
        array, sizes = named.array, self._sizes(named, tokens)
        declared = named.layout.axes or array.axes
        if declared:
            return declared_form(declared, named.table, array.shape, sizes)
        forms = fitting_forms(named.table, array.shape, sizes)
        if not forms:
            expected = " ".join(f"{axis}={n}" for axis in named.table for n in [_size(axis, sizes)])
            raise FormatError(
                "Shape",
                f"expected {expected}, in any order of the axes, got {array.shape}; give axes under "
                f"[layout.{named.stages[0]}], or check that the model and the tokens are those of the run",
            )
        return forms[0] if len(forms) == 1 else self._decided(named, forms, tokens)

    def _decided(self, named: _Named, forms: list[Form], tokens: tuple[int, ...] | None) -> Form:
        """Of several forms of one shape the one whose values are far nearer to ours; else that of the table."""
        told = named.stages, *forms
        if told in self._chosen:
            return self._chosen[told]
        nearest = (
            far_nearest(forms, lambda form: self._distance(named, form, tokens)) if self.weights is not None else None
        )
        chosen = nearest or forms[0]
        if nearest != forms[0]:
            how = "by its values" if nearest else "as in the table: values do not tell"
            self.notes.append(
                f"{' '.join(named.stages)} ({named.array.name}, {named.array.shape}) is read as {chosen}, {how}; "
                f"{len(forms) - 1} other orders of the axes would fit, axes under [layout.{named.stages[0]}] decide"
            )
        self._chosen[told] = chosen
        return chosen

    def _in_pairs(self, named: _Named, permuted: _Named, form: Form, tokens: tuple[int, ...] | None) -> bool:
        """Whether llama.cpp's nodes have the pairs of its files; they do, unless the values are ours as they are."""
        if self._permuted is None:
            self._permuted = True
            if self.weights is not None:
                plain, paired = (self._distance(each, form, tokens) for each in (named, permuted))
                self._permuted = paired <= _LIKE or plain > _LIKE
            order = "neighbours, as in its files" if self._permuted else "halves, by their values"
            self.notes.append(f"{named.array.name} is a node of llama.cpp: its pairs of RoPE are read as {order}")
        return self._permuted

    def _distance(self, named: _Named, form: Form, tokens: tuple[int, ...] | None) -> float:
        """How far an array in this form is from ours."""
        assert self.weights is not None
        stage = BY_NAME[named.stages[0]]
        ours = our_stage(self.weights, self.passes, named.n_pass, key(stage.name, named.layer))
        if tokens is not None:
            ours = ours.take(tokens, axis=stage.axes.split().index("seq"))
        return distance(self._read(named, form, tokens)[stage.name], ours)

    def _read(self, named: _Named, form: Form, tokens: tuple[int, ...] | None) -> dict[str, np.ndarray]:
        """The stages of an array, read now."""
        sizes = self._sizes(named, tokens)
        joined = tuple(single_axes(named.table))
        array = form.arranged(named.array.read(), joined, sizes["ctx"])
        stage, *others = named.stages
        parts = cut(array, named.stages, named.layout.fused, self.config) if others else {stage: array}
        n_tokens = len(self.passes[named.n_pass].ids)
        rows = np.arange(n_tokens) if tokens is None else np.array(tokens)
        later = np.arange(sizes["ctx"]) > rows[:, None] + sizes["ctx"] - n_tokens  # (tokens, ctx)
        return {stage: self._finished(part, BY_NAME[stage], named.layout, later) for stage, part in parts.items()}

    def _finished(self, array: np.ndarray, stage: Stage, layout: Layout, later: np.ndarray) -> np.ndarray:
        seq = len(later)
        array = array.reshape(stage.shape(self.config, seq=seq, ctx=later.shape[1]))
        return finished(array, stage, layout, self.config, later)


def _size(axis: str, sizes: dict[str, int]) -> int:
    return sizes[axis] if axis in sizes else int(np.prod([sizes[each] for each in single_axes([axis])]))


def _list_of_unnamed(names: Sequence[str]) -> str:
    """One note on all of them, layers as {i}."""
    patterns = [*dict.fromkeys(re.sub(r"[0-9]+", "{i}", name) for name in names)]
    more = f" and {len(patterns) - _SHOWN_NAMES} more" if len(patterns) > _SHOWN_NAMES else ""
    return (
        f"{len(names)} arrays stand for no stage that is known and are left out: {', '.join(patterns[:_SHOWN_NAMES])}"
        f"{more}; name them in a mapping, which llorch diff --suggest drafts"
    )
