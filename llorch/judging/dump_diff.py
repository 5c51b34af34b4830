"""Compare two dumps (arrays of forward passes that programs wrote) stage by stage and find the first that differs.

No model is involved, so neither dump is known to be correct. Without a model no stage can be run again, so an error of
a stage cannot be separated from an error of its inputs. `diagnosis` can do that.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llorch.engines.dumps.raw import RawDump
from llorch.engines.dumps.stage_dump import DumpedArray, StageDump
from llorch.runtime.errors import GuardFailed
from llorch.stages.comparison import FLOORS, Report, Tolerance, compare
from llorch.stages.stage_ref import Tokens, token_axis
from llorch.stages.table import BY_NAME, key

TOLERANCE = Tolerance(1e-5, 1e-4)  # for two float32 engines near position 0; scaled up for coarser dtypes


@dataclass(frozen=True)
class Side:
    """One of the two dumps: arrays by pass and name, each read only when it is compared.

    Attributes:
        source: Path of the dump.
        passes: Tokens of each pass, as far as the dump has them.
        arrays: Arrays by pass and name.
        has_stages: True if the names are those of the stage table.
        n_before: Number of cached tokens before the first pass; None if unknown.
    """

    source: str
    passes: tuple[Tokens, ...]
    arrays: Mapping[tuple[int, str], DumpedArray]
    has_stages: bool = False
    n_before: int | None = None

    @classmethod
    def of_stages(cls, dump: StageDump) -> "Side":
        """Create a side whose arrays have names of the stage table."""
        return cls(dump.source, dump.passes, dump.dumped, has_stages=True, n_before=dump.n_before)

    @classmethod
    def of_names(cls, dump: RawDump) -> "Side":
        """Create a side whose arrays have the names of their engine."""
        arrays = {(index, key(a.name, a.layer)): DumpedArray(a.name, a.stored, a.read) for index, a in dump.arrays}
        return cls(dump.source, dump.passes, arrays)

    def of_pass(self, number: int) -> dict[str, None]:
        """Return the names of one pass in dump order; a dict, so that lookup is fast."""
        return {name: None for index, name in self.arrays if index == number}


def diff(a: Side, b: Side) -> Iterator[tuple[int, Report]]:
    """Compare dump `a` with the expected dump `b`: yield the number and the report of each pass that both have.

    Raises:
        GuardFailed: The dumps have different tokens or positions, or no array has the same shape in both.
        UserError: The arrays of a pass have no name in common.
    """
    for number, (tokens_a, tokens_b) in enumerate(zip(a.passes, b.passes, strict=False)):
        if tokens_a != tokens_b:
            message = f"expected {_format(tokens_b)} in pass {number}, as {b.source} has, got {_format(tokens_a)}"
            raise GuardFailed("positions" if tokens_a.ids == tokens_b.ids else "ids", message, source=a.source)
    shared_passes = {number for number, _ in a.arrays} & {number for number, _ in b.arrays}
    for number in sorted(shared_passes):
        report = _compare_pass(a, b, number)
        _require_one_pass(a, b, number, report)
        yield number, report


def _require_one_pass(a: Side, b: Side, number: int, report: Report) -> None:
    """Raise GuardFailed if all shapes differ, because then the dumps hold different numbers of tokens."""
    n_arrays = len(report.differences)  # one array alone may have a wrong shape
    if n_arrays < 2 or any(difference.fault_kind != "shape" for difference in report.differences.values()):
        return
    name, difference = next(iter(report.differences.items()))
    message = f"expected shapes like in {b.source}, got other shapes in all {n_arrays} arrays of pass {number}"
    message += f" ({name}: {difference.fault}); dump the same pass with equal tokens"
    raise GuardFailed("ids", message, source=a.source)


def _format(tokens: Tokens) -> str:
    ellipsis = ",..." if len(tokens.ids) > 8 else ""
    return f"ids {','.join(map(str, tokens.ids[:8]))}{ellipsis} from {tokens.first_position}"


def _compare_pass(a: Side, b: Side, number: int) -> Report:
    """Compare one pass of two dumps, with a tolerance for the coarsest stored dtype."""
    arrays = [array for side in (a, b) for (index, _), array in side.arrays.items() if index == number]
    return compare(_Trace(a, b, number), _Trace(b, a, number), tolerance_of(arrays))


def tolerance_of(arrays: Iterable[DumpedArray]) -> Tolerance:
    """Return the tolerance of arrays, for the coarsest dtype in which one of them is stored."""
    floor = max((FLOORS.get(array.stored, 0.0) for array in arrays), default=0.0)
    return TOLERANCE.times(max(1.0, floor / FLOORS["float32"]))


class _Trace(Mapping[str, np.ndarray]):
    """One pass of a side, restricted to the tokens that both sides have; arrays are read on access and not kept."""

    def __init__(self, side: Side, opposite: Side, number: int) -> None:
        self._side, self._opposite, self._number = side, opposite, number
        self._names = side.of_pass(number)

    def __getitem__(self, name: str) -> np.ndarray:
        dumped, other_tokens = self._side.arrays[self._number, name], self._opposite.arrays[self._number, name].tokens
        array, tokens = dumped.read(), dumped.tokens
        if tokens != other_tokens and (axis := token_axis(BY_NAME[name.rpartition(".")[2]])) is not None:
            array = array.take(self._shared_rows(tokens, other_tokens), axis=axis)
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    def _shared_rows(self, tokens: tuple[int, ...] | None, other_tokens: tuple[int, ...] | None) -> list[int]:
        side_tokens = range(len(self._side.passes[self._number].ids)) if tokens is None else tokens
        return [row for row, token in enumerate(side_tokens) if other_tokens is None or token in other_tokens]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
