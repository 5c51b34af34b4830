"""Values of an error's part of an array: all 0, a copy, a multiple, a shift, clamped or rounded right values.

Each rule predicts the engine's array. A rule holds if its prediction leaves at most 1 % of the error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from llorch.diagnosis.patterns.axes import N_LISTED, ROWS, Axis, join_words
from llorch.diagnosis.patterns.location import UNEXPLAINED, Location
from llorch.ops.rounding import ActivationKind, round_activations

N_FITTED = 8  # fewest entries for each fitted number
MAX_SLICES = 2048  # most slices of an axis that are compared with one another
ON_GRID = 1e-3  # steps: largest distance of a value from its multiple of the step
MAX_GROUP = 8  # most copies of one slice in a row that are looked for
Prediction = tuple[str, np.ndarray]
Sources = Iterable[tuple[str, np.ndarray]]


def describe_values(
    actual: np.ndarray, expected: np.ndarray, location: Location, axes: Sequence[Axis], sources: Sources,
    unexplained: float = UNEXPLAINED,
) -> str:  # fmt: skip
    """Describe the values of an array where its error is; empty if no rule holds.

    `sources` yields names and arrays of which the values may be a copy, in the array's shape. `unexplained` is the
    largest share of the error that a rule leaves.
    """
    mask, total = location.mask, np.linalg.norm(actual - expected)

    def holds(predicted: np.ndarray) -> bool:
        with np.errstate(all="ignore"):
            rest = np.linalg.norm(actual - np.where(mask, predicted, expected))
        return bool(rest <= unexplained * total)

    sub = _Part(actual, expected, location, axes)
    for words, predicted in _predictions(sub, sources):
        if holds(predicted):
            return words
    return ""


class _Part:
    """Part of an array: the engine's and the right values, as arrays where the part is a product of indices."""

    def __init__(self, actual: np.ndarray, expected: np.ndarray, location: Location, axes: Sequence[Axis]) -> None:
        self.actual, self.expected, self.mask = actual, expected, location.mask
        self.axes = [axis for axis in axes if axis.dimension is not None]
        self.a, self.e = actual[location.mask], expected[location.mask]

    def indices(self, axis: Axis) -> np.ndarray:
        """Return the indices of the part on an axis."""
        others = tuple(i for i in range(self.mask.ndim) if i != axis.dimension)
        return np.flatnonzero(self.mask.any(axis=others))


def _predictions(part: _Part, sources: Sources) -> Iterator[Prediction]:
    yield "all 0", np.zeros_like(part.expected)
    if len(part.a) > 1:
        yield f"all {part.a[0]:.4g}", np.full_like(part.expected, part.a[0])
    yield from _multiples(part)
    for name, array in sources:
        yield f"equal to {name}", array
    yield from _slices(part)
    yield from _sums(part)
    yield from _clamped(part)
    yield from _rounded(part)
    yield from _factors(part)


def _multiples(part: _Part) -> Iterator[Prediction]:
    """Yield one factor for all values, and their absolute values."""
    if len(part.e) < N_FITTED or not (size := float(part.e @ part.e)):
        return
    factor = float(part.a @ part.e) / size
    yield f"{factor:.6g} times the right values", factor * part.expected
    yield "the right values without their sign", np.abs(part.expected)


def _sums(part: _Part) -> Iterator[Prediction]:
    """Yield one difference for all values, and one for each entry of a row."""
    if len(part.e) < N_FITTED:
        return
    difference = float((part.a - part.e).mean())
    yield f"the right values plus {difference:.4g}", part.expected + difference
    for axis in part.axes:
        indices = part.indices(axis)
        if axis.noun not in ROWS or len(indices) < 3:
            continue
        rows = (part.actual - part.expected).take(indices, axis=axis.dimension)
        mean = rows.mean(axis=axis.dimension, keepdims=True)
        yield "off by the same row at every position, like a bias", part.expected + mean


def _factors(part: _Part) -> Iterator[Prediction]:
    """Yield a factor for each index of an axis, then for each row."""
    for axis in part.axes:
        indices = part.indices(axis)
        others = tuple(i for i in range(part.expected.ndim) if i != axis.dimension)
        if len(indices) < 2 or len(part.e) < N_FITTED * len(indices):
            continue
        products, squares = (
            np.where(part.mask, x * part.expected, 0).sum(axis=others) for x in (part.actual, part.expected)
        )
        factors = np.divide(products, squares, out=np.ones_like(products), where=squares > 0)
        chosen = factors[indices]
        numbers = join_words([f"{factor:.4g}" for factor in chosen]) if len(chosen) <= N_LISTED else ""
        words = numbers or f"{chosen.min():.4g} to {chosen.max():.4g}"
        yield f"each {axis.noun} times a factor of its own: {words}", part.expected * factors.reshape(axis.labels.shape)
    if part.expected.shape[-1] >= N_FITTED:
        products, squares = ((x * part.expected).sum(axis=-1, keepdims=True) for x in (part.actual, part.expected))
        factors = np.divide(products, squares, out=np.ones_like(products), where=squares > 0)
        chosen = factors[part.mask.any(axis=-1)]
        yield f"each row times a factor of its own: {chosen.min():.4g} to {chosen.max():.4g}", part.expected * factors


def _clamped(part: _Part) -> Iterator[Prediction]:
    """Yield the right values, limited to the range of the engine's."""
    low, high = part.a.min(), part.a.max()
    n_low, n_high = (int(np.isclose(part.a, limit, rtol=1e-6, atol=0).sum()) for limit in (low, high))
    if n_low > 1 and n_high > 1:
        yield f"clamped to {low:.6g} to {high:.6g}", np.clip(part.expected, low, high)
    elif n_high > 1:
        yield f"clamped to at most {high:.6g}", np.minimum(part.expected, high)
    elif n_low > 1:
        yield f"clamped to at least {low:.6g}", np.maximum(part.expected, low)


_ROUNDED: Mapping[str, ActivationKind] = {"bfloat16": "BF16", "float16": "F16"}


def _rounded(part: _Part) -> Iterator[Prediction]:
    """Yield the right values in another type: 16 bits, or a grid with one step, or one scale for a row or a head."""
    expected = np.ascontiguousarray(part.expected)
    for name, kind in _ROUNDED.items():
        yield f"rounded to {name}", round_activations(expected, kind)
    bits = expected.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    yield "cut off to bfloat16, not rounded", bits.view(np.float32).astype(expected.dtype)
    gaps = np.diff(np.unique(part.a))
    step = float(gaps.min()) if len(gaps) > 1 else 0.0
    if step and np.allclose(part.a / step, np.round(part.a / step), rtol=0, atol=ON_GRID):
        yield f"rounded to multiples of {step:.6g}", np.round(expected / step) * step
    scopes = {"the array": None, "each row": -1} | ({"each head": (0, -1)} if expected.ndim > 2 else {})
    for scope, axis in scopes.items():
        largest = np.abs(expected).max(axis=axis, keepdims=True)
        for n_bits in (8, 4):
            step = largest / (2 ** (n_bits - 1) - 1)
            grid = np.divide(expected, step, out=np.zeros_like(expected), where=step > 0)
            yield f"rounded to int{n_bits} with one scale for {scope}", np.round(grid) * step


def _slices(part: _Part) -> Iterator[Prediction]:
    """Yield right values at other indices of an axis: copied, shifted, reversed, exchanged, transposed."""
    for axis in part.axes:
        size = part.expected.shape[axis.dimension]  # type: ignore[index] (an int)
        if 2 <= size <= MAX_SLICES:
            yield from _moved(part, axis)


def _moved(part: _Part, axis: Axis) -> Iterator[Prediction]:
    """Yield the right array with its slices at the indices that fit best, if there are words for them."""
    dimension, indices = axis.dimension, part.indices(axis)
    assert dimension is not None
    others = part.mask.any(axis=dimension)
    actual, expected = (np.moveaxis(x, dimension, -1)[others].T for x in (part.actual, part.expected))
    wrong = actual[indices]
    targets = np.arange(len(expected))
    targets[indices] = _nearest(wrong, expected)
    if words := _describe_moves(axis, targets, indices):
        yield words, np.take(part.expected, targets, axis=dimension)
    if len(wrong) > 2 and np.allclose(wrong, wrong[:1], rtol=1e-6, atol=0):
        same = np.take(part.actual, [indices[0]], axis=dimension)
        yield f"the same values in every {axis.noun}", np.broadcast_to(same, part.expected.shape)


def _nearest(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return for each row the index of the nearest row of `expected`."""
    distances = (expected * expected).sum(axis=1) - 2 * rows @ expected.T
    return distances.argmin(axis=1)


def _describe_moves(axis: Axis, targets: np.ndarray, indices: np.ndarray) -> str:
    """Describe where the values of each index come from; empty if all are in place."""
    noun, labels = axis.noun, axis.labels.ravel()
    moved = indices[targets[indices] != indices]
    if not len(moved):
        return ""
    if (targets == targets[0]).all():
        return f"every {noun} has the right values of {noun} {labels[targets[0]]}"
    offsets = targets[indices] - indices
    if np.all(offsets == offsets[0]):
        return f"{noun} i has the right values of {noun} i {'+' if offsets[0] > 0 else '-'} {abs(offsets[0])}"
    if len(moved) == 2 and targets[moved[0]] == moved[1] and targets[moved[1]] == moved[0]:
        return f"{noun}s {labels[moved[0]]} and {labels[moved[1]]} are exchanged"
    if order := _describe_order(noun, targets, len(moved)):
        return order
    if len(moved) <= N_LISTED:
        return join_words([f"{noun} {labels[i]} has the right values of {noun} {labels[targets[i]]}" for i in moved])
    return ""


def _describe_order(noun: str, targets: np.ndarray, n_moved: int) -> str:
    """Describe an order of all indices: reversed, rolled, repeated, exchanged by pairs, or transposed."""
    n, index = len(targets), np.arange(len(targets))
    if np.array_equal(targets, index[::-1]):
        return f"{noun}s in reversed order"
    shift = int(targets[0])
    if np.array_equal(targets, (index + shift) % n):
        step = f"+ {shift}" if shift <= n // 2 else f"- {n - shift}"
        return f"{noun}s are rolled: {noun} i has the right values of {noun} (i {step}) % {n}"
    for size in range(2, min(MAX_GROUP, n) + 1):
        if np.array_equal(targets, index // size):
            return f"{noun} i has the right values of {noun} i // {size}"
        if n % size == 0 and np.array_equal(targets, index % (n // size)):
            return f"{noun} i has the right values of {noun} i % {n // size}"
    if np.array_equal(targets, index ^ 1):
        return f"neighbouring {noun}s are exchanged by pairs"
    for rows in (rows for rows in range(2, n // 2 + 1) if n % rows == 0):
        if np.array_equal(targets, index.reshape(rows, -1).T.ravel()):
            size = n // rows
            rule = f"{noun} i has the right values of {noun} {size} * (i % {rows}) + i // {rows}"
            return f"{noun}s in another order: {rows} groups of {size} are interleaved ({rule})"
    for size in (size for size in range(2, n // 2 + 1) if n % size == 0):
        blocks = targets.reshape(-1, size) - size * np.arange(n // size)[:, None]
        is_same = (blocks == blocks[0]).all() and np.array_equal(np.sort(blocks[0]), np.arange(size))
        if is_same and (words := _describe_order(noun, blocks[0], int((blocks[0] != np.arange(size)).sum()))):
            return f"in each block of {size} {noun}s: {words}"
    if n_moved > N_LISTED and np.array_equal(np.sort(targets), index):
        start = ", ".join(str(target) for target in targets[: 2 * N_LISTED])
        return f"{noun}s in another order: those of {start}{' ...' if n > 2 * N_LISTED else ''}"
    return ""
