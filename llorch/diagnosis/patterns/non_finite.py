"""NaN and infinity in an array: where they are, the right value there, and the limit of a type that was exceeded."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llorch.diagnosis.patterns.axes import Axis
from llorch.diagnosis.patterns.location import locate

LARGEST = {"float16": 65504.0, "float32": float(np.finfo(np.float32).max)}
EXPONENTS = {kind: float(np.log(largest)) for kind, largest in LARGEST.items()}  # exp of more overflows


def describe_non_finite(
    actual: np.ndarray, expected: np.ndarray, inputs: Mapping[str, np.ndarray], axes: Sequence[Axis]
) -> str:
    """Describe the values of an array that are not finite although the right ones are; empty if there are none.

    Args:
        actual: The engine's array.
        expected: The right array; -inf marks masked entries.
        inputs: Arrays that the stage reads, by stage name.
        axes: Axes of both arrays.
    """
    is_bad = ~np.isfinite(actual) & np.isfinite(expected)
    if not is_bad.any():
        return ""
    kinds = {"NaN": np.isnan(actual[is_bad]).all(), "infinity": np.isinf(actual[is_bad]).all()}
    noun = next((kind for kind, is_only in kinds.items() if is_only), "NaN and infinity")
    share = "all values" if is_bad.all() else f"{is_bad.sum()} of {actual.size} values"
    words = locate(is_bad.astype(float), np.zeros(expected.shape), axes, 0.0).words
    index = tuple(int(i) for i in np.argwhere(is_bad)[0])
    along = [(axis, axis.dimension) for axis in axes if axis.dimension is not None]
    place = ", ".join(f"{axis.noun} {axis.labels.ravel()[index[dimension]]}" for axis, dimension in along)
    where = f"{noun} in {share}{f', {words}' if words else ''}"
    first = f"the first at {place}, where the right value is {expected[index]:,.6g}"
    limit = next(_limits(is_bad, expected, inputs), "")
    return "; ".join(filter(None, [where, first, limit]))


def _limits(is_bad: np.ndarray, expected: np.ndarray, inputs: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield the limits that are exceeded exactly where values are not finite."""
    for name, largest in LARGEST.items():
        if np.array_equal(np.abs(np.where(np.isfinite(expected), expected, 0)) > largest, is_bad):
            smallest = np.abs(expected[is_bad]).min()
            yield f"exactly the values that exceed {name}'s {largest:,.6g}; the smallest of them is {smallest:,.6g}"
    for name, array in inputs.items():
        for kind, limit in EXPONENTS.items() if array.shape == is_bad.shape and not is_bad.all() else ():
            for sign, side in ((1, f"exceeds {limit:.1f}"), (-1, f"is below -{limit:.1f}")):
                if np.array_equal(sign * array > limit, is_bad):
                    yield f"exactly where {name} {side} and exp overflows {kind}"
        if array.shape[:-1] == is_bad.shape[:-1] and not is_bad.any(axis=-1).all():
            yield from _limits_of_rows(np.asarray(is_bad.any(axis=-1)), name, array)


def _limits_of_rows(is_bad: np.ndarray, name: str, array: np.ndarray) -> Iterator[str]:
    """Yield the limits that exactly the bad rows of an input exceed."""
    largest = np.where(np.isfinite(array), array, -np.inf).max(axis=-1)
    for kind, limit in EXPONENTS.items():
        if np.array_equal(largest > limit, is_bad):
            excess = f"whose largest value of {name} exceeds {limit:.1f}, where exp overflows {kind}"
            yield f"only in rows {excess}: subtract the maximum of the row"
    squares = np.square(np.where(np.isfinite(array), array, 0.0)).sum(axis=-1)
    if np.array_equal(squares > LARGEST["float16"], is_bad):
        yield f"only in rows whose sum of squares of {name} exceeds float16's 65,504"
    if np.array_equal(np.isneginf(largest), is_bad):
        yield f"only in rows of {name} without a visible key"
