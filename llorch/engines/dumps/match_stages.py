"""Match arrays of a dump to stages by values: compare every `Pattern` of names with the stages of llorch's run."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llorch.engines.dumps.layout import PAIRED, VALUE_HEADS, DumpLayout, sine_distance
from llorch.engines.dumps.raw import RawArray
from llorch.engines.dumps.reading import ArrayReading, NamedArray, StageReader, run_passes
from llorch.files import Weights
from llorch.runtime.errors import FormatError
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, FUSABLE, STAGES

_FUSED = dict(zip(FUSABLE, (("stacked", "groups"), ("stacked", "alternating")), strict=True))  # possible row orders
_FIRST_OF_LAYER = next(stage.name for stage in STAGES if stage.in_layer)
_GuessKey = tuple[tuple[str, ...], int | None]


@dataclass(frozen=True)
class Guess:
    """Possible stages of a pattern.

    Attributes:
        stages: One stage, or fused projections.
        offset: For a pattern with `{i}` the number minus layer (0 or 1), else the layer; None outside the layers.
        distance: Sine of the angle between the pattern's values and llorch's.
        times: Norm of the values over the norm of llorch's.
        unmasked: True if the array has finite values where llorch's are masked.
        layout: Layout that was tried.
        read: Reading that was tried: tokens and order of axes.
    """

    stages: tuple[str, ...]
    offset: int | None
    distance: float
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
    """Arrays whose names differ only in one number, `{i}` in the pattern's name; or arrays of one name."""

    name: str
    members: list[tuple[int, RawArray, int | None]] = field(default_factory=list)  # pass, array, number
    guesses: dict[_GuessKey, Guess] = field(default_factory=dict)  # best guess by stages and offset
    _fitting: dict[_GuessKey, int] = field(default_factory=dict)  # number of compared members that fit

    @property
    def is_numbered(self) -> bool:
        """True if the name contains `{i}`, or the dump declares a layer."""
        return self.members[0][2] is not None

    @property
    def is_one_name(self) -> bool:
        """True if all members have one name, so that the number may not be a layer, as in `w1`."""
        return len({array.name for _, array, _ in self.members}) == 1

    @property
    def samples(self) -> list[tuple[int, RawArray, int | None]]:
        """Members to compare: the first, often without propagated errors, and the last, often of another pass."""
        return [self.members[0], *self.members[1:][-1:]]

    @property
    def mixes_shapes(self) -> bool:
        """True if arrays of one pass differ in shape, so that the number is not a layer."""
        return len({(n_pass, array.shape) for n_pass, array, _ in self.members}) > len({m[0] for m in self.members})

    def add_guesses(self, guesses: Sequence[Guess]) -> None:
        """Record the best of a member's guesses for the same stages and offset."""
        if not guesses:
            return
        best = min(guesses, key=lambda guess: guess.distance)
        guess_key = best.stages, best.offset
        self._fitting[guess_key] = self._fitting.get(guess_key, 0) + 1
        self.guesses[guess_key] = min(best, self.guesses.get(guess_key, best), key=lambda guess: guess.distance)

    def drop_misfits(self) -> None:
        """Keep only guesses that fit all compared members."""
        self.guesses = {key: guess for key, guess in self.guesses.items() if self._fitting[key] == len(self.samples)}


def group_patterns(arrays: Sequence[tuple[int, RawArray]], n_layers: int) -> list[Pattern]:
    """Group names into patterns, in order; the layer is the number that gives the fewest patterns."""
    groupings = [_group_by_number(arrays, n_layers, which) for which in (0, -1, 1)]  # which number of a name
    return min(groupings, key=lambda patterns: (sum(pattern.mixes_shapes for pattern in patterns), len(patterns)))


def _group_by_number(arrays: Sequence[tuple[int, RawArray]], n_layers: int, which: int) -> list[Pattern]:
    """Group names that differ only in one number: index `which` (0, 1 or -1) of the numbers up to `n_layers`."""
    patterns: dict[str, Pattern] = {}
    for n_pass, array in arrays:
        numbers = [match for match in re.finditer("[0-9]+", array.name) if int(match[0]) <= n_layers]
        name, layer = array.name, array.layer
        if layer is None and len(numbers) >= (2 if which == 1 else 1):  # index 1 needs two numbers
            start, end = numbers[which].span()
            name, layer = f"{name[:start]}{{i}}{name[end:]}", int(name[start:end])
        patterns.setdefault(name, Pattern(name)).members.append((n_pass, array, layer))
    return [*patterns.values()]


def match_patterns(patterns: Sequence[Pattern], weights: Weights, passes: tuple[Tokens, ...]) -> None:
    """Run llorch once, and record each pattern's guesses whose shapes fit all its compared members."""
    reader = StageReader(weights.config, passes, None)
    layer_stages: dict[str, np.ndarray] = {}  # stages of the current layer, to fuse them

    def observe(n_pass: int, name: str, llorch_x: np.ndarray) -> bool:
        layer, _, stage = name.rpartition(".")
        if stage == _FIRST_OF_LAYER:
            layer_stages.clear()
        layer_stages[stage] = llorch_x
        candidates = {(stage,): llorch_x}
        fused = [parts for parts in _FUSED if parts[-1] == stage and layer_stages.keys() >= {*parts}]
        candidates |= {parts: np.concatenate([layer_stages[part] for part in parts], -1) for parts in fused}
        for stages, array in candidates.items():
            for pattern in patterns:
                _compare_one(pattern, reader, n_pass, stages, int(layer[1:]) if layer else None, array)
        return True

    run_passes(weights, passes, observe)
    for pattern in patterns:
        pattern.drop_misfits()


def _compare_one(
    pattern: Pattern, reader: StageReader, n_pass: int, stages: tuple[str, ...], layer: int | None, llorch_x: np.ndarray
) -> None:
    """Compare a pattern's samples of this pass with these stages of this layer, and record the guesses.

    The number in a name must be the layer or, if names count from 1, one more.
    """
    for array_pass, array, number in pattern.samples:
        offset = layer if number is None or layer is None else number - layer
        is_possible = number is None or offset in (0, 1) or (offset is None and pattern.is_one_name)
        if array_pass != n_pass or not is_possible:
            continue
        pattern.add_guesses([*_guess(NamedArray(n_pass, array, stages, layer, DumpLayout()), reader, offset, llorch_x)])


def _guess(named: NamedArray, reader: StageReader, offset: int | None, llorch_x: np.ndarray) -> Iterator[Guess]:
    """Yield a guess for every reading and layout of an array as these stages."""
    try:
        readings = reader.readings(named)
    except FormatError:
        return
    layouts = [DumpLayout(fused=order) for order in _FUSED.get(named.stages, ("stacked",))]
    layouts += [DumpLayout(permuted=True)] if named.stages[0] in PAIRED and len(named.stages) == 1 else []
    layouts += [DumpLayout(tiled=True)] if named.stages[0] in VALUE_HEADS else []
    for read in readings:
        rows = read.select(llorch_x, named.table)
        for layout in layouts:
            parts = reader.arrays(replace(named, layout=layout), read)
            actual = np.concatenate([parts[stage] for stage in named.stages], axis=-1)
            both_finite = np.isfinite(actual) & np.isfinite(rows)
            times = float(np.linalg.norm(actual[both_finite]) / (np.linalg.norm(rows[both_finite]) or 1.0))
            unmasked = bool((np.isfinite(actual) & ~both_finite).any())
            yield Guess(named.stages, offset, sine_distance(actual, rows), times, unmasked, layout, read)
