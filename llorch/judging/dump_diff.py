"""Two dumps beside each other, stage by stage: how far they are apart, and where they first are.

Neither is right by itself: without a model nothing can be run again, so what one stage made is not told from what it
was given. `diagnosis` does that.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.stage_dump import StageDump
from llorch.runtime.errors import GuardFailed
from llorch.stages.comparison import FLOORS, Report, Tolerance, compare
from llorch.stages.stage_ref import Tokens, token_axis
from llorch.stages.table import BY_NAME, key

TOLERANCE = Tolerance(1e-5, 1e-4)  # of two float32 engines near position 0; of coarser ones in proportion


@dataclass(frozen=True)
class Side:
    """One of the two: arrays by pass and name, each read when it is compared.

    Attributes:
        source: What it was read from.
        passes: Tokens, where they are known.
        arrays: What reads an array, its stored dtype and which tokens of the pass it has, all where that is None.
    """

    source: str
    passes: tuple[Tokens, ...]
    arrays: Mapping[tuple[int, str], tuple[Callable[[], np.ndarray], str, tuple[int, ...] | None]]

    @classmethod
    def of_stages(cls, dump: StageDump) -> "Side":
        """Make a side whose arrays have names of the stage table."""
        arrays = {place: (dumped.read, dumped.stored, dumped.tokens) for place, dumped in dump.dumped.items()}
        return cls(dump.source, dump.passes, arrays)

    @classmethod
    def of_names(cls, dump: RawDump) -> "Side":
        """Make a side whose arrays have the names of their engine."""
        arrays = {(n_pass, key(a.name, a.layer)): (a.read, a.stored, None) for n_pass, a in dump.arrays}
        return cls(dump.source, dump.passes, arrays)

    def of_pass(self, number: int) -> dict[str, None]:
        """Return the names of one pass, in the order in which they were written."""
        return {name: None for n_pass, name in self.arrays if n_pass == number}


def diff(a: Side, b: Side) -> Iterator[tuple[int, Report]]:
    """Compare a dump with the dump that it should be: yield each pass that both have, and its report.

    Raises:
        GuardFailed: They are of other tokens or positions, or all of their arrays are of another number of tokens.
        ValueError: They have no name in common.
    """
    for number, (ours, theirs) in enumerate(zip(a.passes, b.passes, strict=False)):
        if ours != theirs:
            message = f"expected {_format_ids(theirs)} in pass {number}, as {b.source} has, got {_format_ids(ours)}"
            raise GuardFailed("positions" if ours.ids == theirs.ids else "ids", message, source=a.source)
    shared = {number for number, _ in a.arrays} & {number for number, _ in b.arrays}
    for number in sorted(shared):
        report = _compared(a, b, number)
        _require_one_pass(a, b, number, report)
        yield number, report


def _require_one_pass(a: Side, b: Side, number: int, report: Report) -> None:
    """Refuse (GuardFailed) sides without a shape in common: they hold another number of tokens each."""
    n_arrays = len(report.differences)
    if n_arrays < 2 or any(difference.fault_kind != "shape" for difference in report.differences.values()):
        return
    name, difference = next(iter(report.differences.items()))
    message = f"expected shapes like in {b.source}, got other shapes in all {n_arrays} arrays of pass {number}"
    message += f" ({name}: {difference.fault}); dump the same pass with equal tokens"
    raise GuardFailed("ids", message, source=a.source)


def _format_ids(tokens: Tokens) -> str:
    more = ",..." if len(tokens.ids) > 8 else ""
    return f"ids {','.join(map(str, tokens.ids[:8]))}{more} from {tokens.first_position}"


def _compared(a: Side, b: Side, number: int) -> Report:
    """Compare one pass of two dumps, no finer than the coarsest stored dtype."""
    stored = {dtype for side in (a, b) for (n_pass, _), (_, dtype, _) in side.arrays.items() if n_pass == number}
    floor = max((FLOORS.get(dtype, 0.0) for dtype in stored), default=0.0)
    return compare(_Trace(a, b, number), _Trace(b, a, number), TOLERANCE.times(max(1.0, floor / FLOORS["float32"])))


class _Trace(Mapping[str, np.ndarray]):
    """One pass of a side, of the tokens that the other has, too; an array is in memory while it is compared."""

    def __init__(self, side: Side, other: Side, number: int) -> None:
        self._side, self._other, self._number = side, other, number
        self._names = side.of_pass(number)

    def __getitem__(self, name: str) -> np.ndarray:
        read, _, tokens = self._side.arrays[self._number, name]
        array = read()
        theirs = self._other.arrays[self._number, name][2]
        if tokens != theirs and (axis := token_axis(BY_NAME[name.rpartition(".")[2]])) is not None:
            array = array.take(self._rows(tokens, theirs), axis=axis)
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    def _rows(self, tokens: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> list[int]:
        mine = range(len(self._side.passes[self._number].ids)) if tokens is None else tokens
        return [row for row, token in enumerate(mine) if theirs is None or token in theirs]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
