"""Align two dumps of one text whose passes differ: cached and not, in chunks and whole, a row of a batch and alone.

Rows of all passes are joined and compared by absolute position. Scores and probabilities are compared on the keys that
both dumps have; keys that a pass did not have yet count as masked. A cache is compared once, after the last pass that
has it. A recurrent state is compared after the last token that ends a pass in both dumps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llorch.engines.dumps.ids import shown
from llorch.judging.dump_diff import Side, tolerance_of
from llorch.runtime.errors import GuardFailed, UserError
from llorch.stages.comparison import Difference, Report, Tolerance, measure
from llorch.stages.stage_ref import token_axis
from llorch.stages.table import BY_NAME, Stage, forward_order


@dataclass(frozen=True)
class Parting:
    """First stage in which two dumps differ, the first position that differs in it, and its pass in each dump."""

    stage: str
    position: int
    pass_a: int
    pass_b: int


@dataclass(frozen=True)
class _Rows:
    """Rows of a stage of one dump by absolute position, each with the number of its pass."""

    array: np.ndarray
    axis: int | None  # of the rows; None for a recurrent state
    passes: dict[int, int]  # position -> pass, in the order of the rows

    def at(self, positions: list[int]) -> np.ndarray:
        if self.axis is None:
            return self.array
        index = {position: row for row, position in enumerate(self.passes)}
        return self.array.take([index[position] for position in positions], axis=self.axis)


def align(a: Side, b: Side) -> tuple[Report, Parting | None] | None:
    """Compare two dumps of one text by position; None if their passes are equal, or their texts are not.

    Raise UserError if no stage has a position in both dumps.
    """
    if not _can_align(a, b):
        return None
    keys = range(max(_first_key(a), _first_key(b)), min(_end(a), _end(b)))
    names = [name for name in forward_order(_names(a)) if name in _names(b)]
    tolerance = tolerance_of([*a.arrays.values(), *b.arrays.values()])
    tolerance = Tolerance(tolerance.error, tolerance.worst, tolerance.worst)
    differences, parting = dict[str, Difference](), None
    for name in names:
        rows_a, rows_b = _rows(a, b, name, keys), _rows(b, a, name, keys)
        positions = [position for position in rows_a.passes if position in rows_b.passes]
        if not positions:
            continue
        pair = tuple(_numbers(rows.at(positions)) for rows in (rows_a, rows_b))
        difference = measure(*pair, masked=BY_NAME[_stage_name(name)].masked, token_axis=rows_a.axis)
        differences[name] = difference
        if parting is None and not difference.within(tolerance):
            position = positions[_first_row(difference, pair, rows_a.axis, tolerance)]
            parting = Parting(name, position, rows_a.passes[position], rows_b.passes[position])
    if not differences:
        raise UserError(
            f"diff: expected a stage with equal positions in both dumps, got none in {a.source}, {b.source}"
        )
    only = {"actual": _only(a, differences), "expected": _only(b, differences)}
    return Report(differences, tolerance, only), parting


def pair_rows(rows_a: Sequence[Side], rows_b: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Pair the rows of two dumps that have the same text; GuardFailed if a batch has none of the other's texts."""
    if len(rows_a) == len(rows_b) == 1:
        return [(rows_a[0], rows_b[0])]
    pairs = [(a, b) for a in rows_a for b in rows_b if _has_equal_passes(a, b) or _can_align(a, b)]
    if not pairs:
        (ids_a, ids_b) = ("; ".join(shown([*_ids(side).values()]) for side in rows) for rows in (rows_a, rows_b))
        raise GuardFailed(
            "ids", f"expected a row of {ids_b}, as {rows_b[0].source} has, got {ids_a}", source=rows_a[0].source
        )
    return pairs


def _has_equal_passes(a: Side, b: Side) -> bool:
    return all(tokens_a == tokens_b for tokens_a, tokens_b in zip(a.passes, b.passes, strict=False))


def _can_align(a: Side, b: Side) -> bool:
    """Tell if passes differ, but ids are equal at shared positions, and the texts start at the same position."""
    if _has_equal_passes(a, b) or not (a.has_stages and b.has_stages):
        return False
    if None not in (a.n_before, b.n_before) and _first_key(a) != _first_key(b):
        return False
    ids_a, ids_b = _ids(a), _ids(b)
    shared = ids_a.keys() & ids_b.keys()
    return bool(shared) and all(ids_a[position] == ids_b[position] for position in shared)


def _ids(side: Side) -> dict[int, int]:
    """Return the token id at each position."""
    return {
        position: token
        for tokens in side.passes
        for position, token in enumerate(tokens.ids, start=tokens.first_position)
    }


def _first_key(side: Side) -> int:
    return side.passes[0].first_position - (side.n_before or 0)


def _end(side: Side, number: int = -1) -> int:
    """Return the position after the last token of a pass."""
    return side.passes[number].first_position + len(side.passes[number].ids)


def _names(side: Side) -> dict[str, None]:
    return {name: None for _, name in side.arrays}


def _stage_name(name: str) -> str:
    return name.rpartition(".")[2]


def _only(side: Side, differences: dict[str, Difference]) -> list[str]:
    return [name for name in forward_order(_names(side)) if name not in differences]


def _numbers(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _rows(side: Side, opposite: Side, name: str, keys: range) -> _Rows:
    """Read the rows of a stage; scores have the columns of `keys`."""
    stage, numbers = BY_NAME[_stage_name(name)], [number for number, array_name in side.arrays if array_name == name]
    axis = token_axis(stage)
    if axis is None:
        ends = {_end(opposite, number) for number in range(len(opposite.passes))}
        number = max((number for number in numbers if _end(side, number) in ends), default=numbers[-1])
        return _Rows(side.arrays[number, name].read(), None, {_end(side, number) - 1: number})
    if "seq" not in stage.axes.split():
        array, end = side.arrays[numbers[-1], name].read(), _end(side, numbers[-1])
        return _Rows(array, axis, dict.fromkeys(range(end - array.shape[axis], end), numbers[-1]))
    arrays, passes = [], dict[int, int]()
    for number in numbers:
        dumped, tokens = side.arrays[number, name], side.passes[number]
        indices = range(len(tokens.ids)) if dumped.tokens is None else dumped.tokens
        passes |= {tokens.first_position + index: number for index in indices}
        arrays.append(_select_keys(dumped.read(), stage, _end(side, number), keys))
    return _Rows(np.concatenate(arrays, axis=axis), axis, passes)


def _select_keys(array: np.ndarray, stage: Stage, end: int, keys: range) -> np.ndarray:
    """Select the keys of scores of a pass that ends at position `end`, and mask later keys."""
    if not stage.axes.endswith("ctx"):
        return array
    later = [(0, 0), (0, 0), (0, max(0, keys.stop - end))]
    first_key = end - array.shape[-1]
    array = np.pad(array, later, constant_values=-np.inf if stage.masked else 0)
    return array[..., keys.start - first_key : keys.stop - first_key]


def _first_row(difference: Difference, pair: tuple[np.ndarray, ...], axis: int | None, tolerance: Tolerance) -> int:
    """Return the index of the first row that differs by more than the tolerance; of the worst if none does alone."""
    a, b = pair
    if axis is None or a.shape != b.shape:
        return 0
    other_axes = tuple(index for index in range(a.ndim) if index != axis)
    if difference.tokens is None:  # masks or values that are not finite differ, or integers
        is_wrong = ((a != b) & ~(np.isfinite(a) & np.isfinite(b) & (a.dtype.kind == "f"))).any(axis=other_axes)
    else:
        is_wrong = difference.tokens > tolerance.error
    return int(is_wrong.argmax()) if is_wrong.any() else difference.index[axis] if difference.index else 0
