"""Whose values are like which stage of our run: arrays of patterns of names beside every stage that they fit."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llorch.engines.dumps.layout import PAIRED, DumpLayout, unlike
from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.reading import ArrayReading, NamedArray, StageReader, run_passes
from llorch.files import Weights
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, FUSABLE, STAGES

_FUSED = dict(zip(FUSABLE, (("stacked", "groups"), ("stacked", "alternating")), strict=True))
_FIRST_OF_LAYER = next(stage.name for stage in STAGES if stage.in_layer)
_Place = tuple[tuple[str, ...], int | None]


@dataclass(frozen=True)
class Guess:
    """What a pattern may stand for.

    Attributes:
        stages: One, or those that are fused.
        offset: What its numbers exceed the layer by; of a pattern without numbers the layer, None outside of them.
        unlike: Sine of the angle between its values and ours.
        times: Its size over ours, where it is alike.
        unmasked: Whether it has finite numbers where ours has none.
        layout: With which it is least unlike.
        read: In which form.
    """

    stages: tuple[str, ...]
    offset: int | None
    unlike: float
    times: float
    unmasked: bool
    layout: DumpLayout
    read: ArrayReading

    @property
    def row(self) -> int:
        """Row of the guessed stage in the stage table."""
        return STAGES.index(BY_NAME[self.stages[0]])


@dataclass
class Pattern:
    """Arrays whose names differ in one number only, `{i}` in the pattern's; or of one name."""

    name: str
    members: list[tuple[int, RawArray, int | None]] = field(default_factory=list)  # pass, array, number
    guesses: dict[_Place, Guess] = field(default_factory=dict)  # by stages and offset; of those that fit
    _fitting: dict[_Place, int] = field(default_factory=dict)

    @property
    def is_numbered(self) -> bool:
        """True if the name holds a number for the layer."""
        return self.members[0][2] is not None

    @property
    def is_one_name(self) -> bool:
        """True if all members have one name, so that the number may not be a layer's."""
        return len({array.name for _, array, _ in self.members}) == 1

    @property
    def compared(self) -> list[tuple[int, RawArray, int | None]]:
        """The first, which a mistake may not have reached yet, and the last, which may be of another pass."""
        return [self.members[0], *self.members[1:][-1:]]

    @property
    def mixes_shapes(self) -> bool:
        """True if arrays of one pass differ in shape: then the number is no layer."""
        return len({(n_pass, array.shape) for n_pass, array, _ in self.members}) > len({m[0] for m in self.members})

    def take(self, guesses: Sequence[Guess]) -> None:
        """Remember the best guess of a member for one place."""
        if not guesses:
            return
        best = min(guesses, key=lambda guess: guess.unlike)
        place = best.stages, best.offset
        self._fitting[place] = self._fitting.get(place, 0) + 1
        self.guesses[place] = min(best, self.guesses.get(place, best), key=lambda guess: guess.unlike)

    def forget_misfits(self) -> None:
        """Keep what all compared members may be."""
        self.guesses = {p: guess for p, guess in self.guesses.items() if self._fitting[p] == len(self.compared)}


def patterns_of(arrays: Sequence[tuple[int, RawArray]], n_layers: int) -> list[Pattern]:
    """Group names into patterns, in their order; the number that gives the fewest patterns is the layer."""
    spelled = [_patterns(arrays, n_layers, which) for which in (0, -1, 1)]
    return min(spelled, key=lambda patterns: (sum(each.mixes_shapes for each in patterns), len(patterns)))


def _patterns(arrays: Sequence[tuple[int, RawArray]], n_layers: int, which: int) -> list[Pattern]:
    """Group names that differ only in one number, the `which`-th that can be a layer."""
    patterns: dict[str, Pattern] = {}
    for n_pass, array in arrays:
        numbers = [found for found in re.finditer("[0-9]+", array.name) if int(found[0]) <= n_layers]
        name, layer = array.name, array.layer
        if layer is None and len(numbers) >= (2 if which == 1 else 1):
            start, end = numbers[which].span()
            name, layer = f"{name[:start]}{{i}}{name[end:]}", int(name[start:end])
        patterns.setdefault(name, Pattern(name)).members.append((n_pass, array, layer))
    return [*patterns.values()]


def compare(patterns: Sequence[Pattern], weights: Weights, passes: tuple[Tokens, ...]) -> None:
    """Fill in what every pattern may be, while our run goes by."""
    reader = StageReader(weights.config, passes, None)
    beside: dict[str, np.ndarray] = {}  # stages of the layer that runs, for those that are fused

    def see(n_pass: int, name: str, ours: np.ndarray) -> bool:
        layer, _, stage = name.rpartition(".")
        if stage == _FIRST_OF_LAYER:
            beside.clear()
        beside[stage] = ours
        wanted = {(stage,): ours}
        fused = [parts for parts in _FUSED if parts[-1] == stage and beside.keys() >= {*parts}]
        wanted |= {parts: np.concatenate([beside[part] for part in parts], -1) for parts in fused}
        for stages, array in wanted.items():
            for pattern in patterns:
                _compare_one(pattern, reader, n_pass, stages, int(layer[1:]) if layer else None, array)
        return True

    run_passes(weights, passes, see)
    for pattern in patterns:
        pattern.forget_misfits()


def _compare_one(
    pattern: Pattern, reader: StageReader, n_pass: int, stages: tuple[str, ...], layer: int | None, ours: np.ndarray
) -> None:
    """Record the guesses that a pattern's arrays of this pass are these stages of this layer."""
    for number, array, counted in pattern.compared:
        offset = layer if counted is None or layer is None else counted - layer
        is_meant = counted is None or offset in (0, 1) or (offset is None and pattern.is_one_name)
        if number != n_pass or not is_meant:
            continue
        pattern.take([*_guesses(NamedArray(n_pass, array, stages, layer, DumpLayout()), reader, offset, ours)])


def _guesses(named: NamedArray, reader: StageReader, offset: int | None, ours: np.ndarray) -> Iterator[Guess]:
    """Yield a guess for every way to read an array as these stages."""
    try:
        ways = reader.ways(named)
    except FormatError:
        return
    layouts = [DumpLayout(fused=order) for order in _FUSED.get(named.stages, ("stacked",))]
    layouts += [DumpLayout(permuted=True)] if named.stages[0] in PAIRED and len(named.stages) == 1 else []
    for read in ways:
        rows = read.same_of(ours, named.table)
        for layout in layouts:
            parts = reader.arrays(replace(named, layout=layout), read)
            actual = np.concatenate([parts[stage] for stage in named.stages], axis=-1)
            both = np.isfinite(actual) & np.isfinite(rows)
            times = float(np.linalg.norm(actual[both]) / (np.linalg.norm(rows[both]) or 1.0))
            unmasked = bool((np.isfinite(actual) & ~both).any())
            yield Guess(named.stages, offset, unlike(actual, rows), times, unmasked, layout, read)
