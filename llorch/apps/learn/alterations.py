"""Wrong functions that are made from a right one: its arguments or its results are altered in one simple way.

An alteration says what a wrong function computes, not how it is written: `gate and up are exchanged` also describes
code that applies SiLU to the other factor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.function_calls import FunctionCall, Results
from llorch.apps.learn.guard import run_reference

Array = np.ndarray
Arguments = Mapping[str, Any]
Compute = Callable[[FunctionCall], Results]
FACTOR_ERROR = 1e-5  # largest relative difference of a number from a factor times the right one


@dataclass(frozen=True)
class Alteration:
    """A wrong function.

    Attributes:
        name: Short name, `gate-and-up-exchanged`.
        condition: Continues "your function returns what the right one returns if ...".
        compute: Returns its results for a call.
    """

    name: str
    condition: str
    compute: Compute


def make_alterations(exercise: Exercise, call: FunctionCall) -> Iterator[Alteration]:
    """Make the alterations that fit the arguments and results of a call, the simple ones first."""
    for name, condition, change in _argument_changes(call.arguments):

        def compute(call: FunctionCall, change: Any = change) -> Results:
            return run_reference(exercise, {**call.arguments, **change(call.arguments)})

        yield Alteration(name, condition, compute)
    for index, name in enumerate(exercise.returns):
        for change_name, condition, change in _result_changes(name, index, call):

            def compute_changed(call: FunctionCall, index: int = index, change: Any = change) -> Results:
                return *call.expected[:index], change(call), *call.expected[index + 1 :]

            yield Alteration(change_name, condition, compute_changed)
    yield from _exchanged_results(exercise)


def _exchanged_results(exercise: Exercise) -> Iterator[Alteration]:
    """Yield alterations of the order of several results."""
    for first, second in combinations(range(len(exercise.returns)), 2):
        order = [*range(len(exercise.returns))]
        order[first], order[second] = second, first
        names = exercise.returns[first], exercise.returns[second]
        yield Alteration(
            f"{'-and-'.join(names)}-exchanged", f"{' and '.join(names)} are exchanged",
            lambda call, order=order: tuple(call.expected[index] for index in order),
        )  # fmt: skip


def _softmax(array: Array) -> Array:
    weights = np.exp(array - array.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


FLOAT_CHANGES: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (  # name, words of what stands in place of it
    ("negated", "minus {}", np.negative),
    ("squared", "the square of {}", np.square),
    ("root", "the root of {}", np.sqrt),
    ("inverted", "1 / {}", np.reciprocal),
    ("absolute", "the absolute value of {}", np.abs),
    ("exponential", "exp({})", np.exp),
    ("logarithm", "the logarithm of {}", np.log),
    ("softmax", "the softmax of {}", lambda array: _softmax(array) if array.ndim else array),
    ("sigmoid", "the sigmoid of {}", lambda array: 1 / (1 + np.exp(-array))),
    ("tanh", "tanh({})", np.tanh),
    ("above-zero", "the part of {} above 0", lambda array: np.maximum(array, 0)),
    ("truncated", "{} without its fraction", np.trunc),
    ("plus-one", "{} + 1", lambda array: array + 1),
    ("from-one", "1 - {}", lambda array: 1 - array),
)
INTEGER_CHANGES: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("plus-one", "{} + 1", lambda array: array + 1),
    ("minus-one", "{} - 1", lambda array: array - 1),
    ("byte-order", "{} with its bytes in the other order", lambda array: array.byteswap()),
)
AXIS_CHANGES: tuple[tuple[str, str, Callable[[Array, int], Array]], ...] = (
    ("reversed", "{}, reversed along axis {}", np.flip),
    ("shifted-on", "{}, shifted by 1 along axis {}", lambda array, axis: np.roll(array, 1, axis)),
    ("shifted-back", "{}, shifted by -1 along axis {}", lambda array, axis: np.roll(array, -1, axis)),
    ("of-first", "the first entry of {} along axis {} for all", lambda a, axis: _repeated(a.take([0], axis), a)),
    ("of-last", "the last entry of {} along axis {} for all", lambda a, axis: _repeated(a.take([-1], axis), a)),
    ("sum", "the sum of {} over axis {} for all", lambda a, axis: _repeated(a.sum(axis, keepdims=True), a)),
    ("mean", "the mean of {} over axis {} for all", lambda a, axis: _repeated(a.mean(axis, keepdims=True), a)),
    ("largest", "the maximum of {} over axis {} for all", lambda a, axis: _repeated(a.max(axis, keepdims=True), a)),
    ("centred", "{} minus its mean over axis {}", lambda array, axis: array - array.mean(axis, keepdims=True)),
    ("normalised", "{} divided by its sum over axis {}", lambda array, axis: array / array.sum(axis, keepdims=True)),
    ("cumulated", "the running sum of {} along axis {}", lambda array, axis: array.cumsum(axis)),
    ("sorted", "{}, sorted along axis {}", np.sort),
)  # fmt: skip
PAIR_CHANGES: tuple[tuple[str, str, Callable[[Array, int, int], Array]], ...] = (
    ("transposed", "{} with its axes {} and {} exchanged", np.swapaxes),
    ("reshaped", "{}, reshaped where its axes {} and {} had to be exchanged",
     lambda array, first, second: np.swapaxes(array.reshape(np.swapaxes(array, first, second).shape), first, second)),
    ("cut", "{}, with the numbers of its axes {} and {} in the other order",
     lambda array, first, second: np.ascontiguousarray(np.swapaxes(array, first, second)).reshape(array.shape)),
)  # fmt: skip
CONSTANTS = (0.0, 1e-8, float(np.finfo(np.float32).eps), 1e-6, 1e-5, 1.0, 10000.0, 500000.0, 1000000.0)  # eps, theta
SCALAR_CHANGES: tuple[tuple[str, str, Callable[[float], float]], ...] = (
    ("squared", "its square", lambda old: old * old),
    ("root", "its root", lambda old: abs(old) ** 0.5),
    ("inverted", "1 / {}", lambda old: 1 / old),
    ("negated", "-{}", lambda old: -old),
    ("doubled", "2 * {}", lambda old: 2 * old),
    ("halved", "{} / 2", lambda old: old / 2),
    ("from-one", "1 - {}", lambda old: 1 - old),
)


def _repeated(entry: Array, like: Array) -> Array:
    return np.broadcast_to(entry, like.shape).astype(like.dtype)


Change = Callable[[Any], Any]


def _array_changes(name: str, value: Array) -> Iterator[tuple[str, str, Change]]:
    """Yield name, words of what stands in place of an array, and the change."""
    yield f"{name}-not-used", "zeros", np.zeros_like
    yield f"{name}-is-one", "ones", np.ones_like
    for label, words, function in FLOAT_CHANGES if value.dtype.kind == "f" else INTEGER_CHANGES:
        yield f"{name}-{label}", words.format(name), function
    for axis in range(value.ndim) if value.size > 1 else ():
        for label, words, along in AXIS_CHANGES:
            yield f"{name}-{label}-{axis}", words.format(name, axis), lambda old, f=along, axis=axis: f(old, axis)
    for first, second in combinations(range(value.ndim), 2):
        for label, words, across in PAIR_CHANGES:
            yield (
                f"{name}-{label}-{first}-{second}",
                words.format(name, first, second),
                (lambda old, f=across, axes=(first, second): f(old, *axes)),
            )


def _scalar_changes(name: str, value: float) -> Iterator[tuple[str, str, Change]]:
    """Yield name, words of what stands in place of a number, and the change."""
    if isinstance(value, bool):
        yield f"not-{name}", f"not {name}", lambda old: not old
    elif isinstance(value, int):
        for label, step in (("plus-one", 1), ("minus-one", -1)):
            yield f"{name}-{label}", f"{name} {step:+d}", lambda old, step=step: old + step
        for label, words, whole in (("doubled", "2 * {}", 2.0), ("halved", "{} // 2", 0.5), ("missing", "0", 0.0)):
            yield f"{name}-{label}", words.format(name), lambda old, factor=whole: int(old * factor)
    else:
        for constant in CONSTANTS:
            yield f"{name}-is-{constant:g}", f"always {constant:g}", lambda old, constant=constant: constant
        for label, words, function in SCALAR_CHANGES:
            yield f"{name}-{label}", words.format(name), function


def _argument_changes(arguments: Arguments) -> Iterator[tuple[str, str, Callable[[Arguments], Arguments]]]:
    """Yield name, condition and change of one argument, or of two."""
    for name, value in arguments.items():
        is_array = isinstance(value, Array)
        if not is_array and not isinstance(value, int | float):
            continue
        for label, words, change in _array_changes(name, value) if is_array else _scalar_changes(name, value):
            yield (
                label,
                f"{words} stands in place of {name}",
                (lambda old, name=name, change=change: {name: None if old[name] is None else change(old[name])}),
            )
    shapes = {name: value.shape for name, value in arguments.items() if isinstance(value, Array)}
    numbers = [name for name, value in arguments.items() if isinstance(value, float)]
    alike = [pair for pair in combinations(shapes, 2) if shapes[pair[0]] == shapes[pair[1]]]
    for first, second in [*alike, *combinations(numbers, 2)]:
        yield (
            f"{first}-and-{second}-exchanged",
            f"{first} and {second} are exchanged",
            (lambda old, pair=(first, second): {pair[0]: old[pair[1]], pair[1]: old[pair[0]]}),
        )
        for source, target in ((first, second), (second, first)):
            yield (
                f"{source}-for-{target}",
                f"{source} stands in place of {target}",
                (lambda old, source=source, target=target: {target: old[source]}),
            )


def _result_changes(
    name: str, index: int, call: FunctionCall
) -> Iterator[tuple[str, str, Callable[[FunctionCall], Array]]]:
    """Yield name, condition and change of one result."""
    expected = call.expected[index]
    if (factor := _find_factor(call.actual[index], expected)) is not None:
        yield from _factors(name, index, call, factor)
    for label, words, change in _array_changes(name, expected) if expected.dtype.kind in "fiu" else ():
        yield label, f"it returns {words}", lambda call, change=change: change(call.expected[index])
    for key, value in call.arguments.items():
        if not isinstance(value, Array) or value.dtype != expected.dtype:
            continue
        if value.shape == expected.shape:
            yield f"{key}-unchanged", f"it returns {key} as it is", lambda call, key=key: call.arguments[key]
        for label, words, function in COMBINED if expected.dtype.kind == "f" else ():
            yield (
                f"{name}-{label}-{key}",
                f"it returns {words.format(name, key)}",
                (lambda call, key=key, function=function: function(call.expected[index], call.arguments[key])),
            )


COMBINED: tuple[tuple[str, str, Callable[[Array, Array], Array]], ...] = (
    ("plus", "{} + {}", np.add), ("minus", "{} - {}", np.subtract), ("times", "{} * {}", np.multiply),
    ("over", "{} / {}", np.divide),
)  # fmt: skip


def _factors(
    name: str, index: int, call: FunctionCall, factor: float
) -> Iterator[tuple[str, str, Callable[[FunctionCall], Array]]]:
    """Yield one factor of every number: the size of an axis or a number in the arguments, its power, or a constant."""
    for words, measure in _measures(call.arguments) if call.expected[index].ndim else ():
        for format_words, power in (
            ("{}", 1.0),
            ("1 / {}", -1.0),
            ("the root of {}", 0.5),
            ("1 / the root of {}", -0.5),
        ):
            for constant in (1.0, -1.0):
                try:
                    is_equal = bool(
                        np.isclose(
                            constant * float(measure(call.arguments)) ** power, factor, rtol=FACTOR_ERROR, atol=0
                        )
                    )
                except (ZeroDivisionError, OverflowError, TypeError):
                    continue
                if is_equal:
                    text = format_words.format(words) + ("" if constant == 1 else f", times {constant:g}")
                    yield (
                        f"{name}-factor",
                        f"{name} is multiplied by {text}",
                        (
                            lambda call, measure=measure, power=power, constant=constant: (
                                call.expected[index]
                                * call.expected[index].dtype.type(constant * measure(call.arguments) ** power)
                            )
                        ),
                    )
    yield (
        f"{name}-times-{factor:.4g}",
        f"{name} is multiplied by {factor:.6g}",
        (lambda call: call.expected[index] * call.expected[index].dtype.type(factor)),
    )
    yield (
        f"{name}-times-a-factor",
        f"{name} is multiplied by a factor, in the first call {factor:.6g}, in others another",
        (
            lambda call: (
                call.expected[index]
                * call.expected[index].dtype.type(_find_factor(call.actual[index], call.expected[index]) or 1.0)
            )
        ),
    )


def _measures(arguments: Arguments) -> Iterator[tuple[str, Callable[[Arguments], float]]]:
    """Yield words for a number of the arguments, and a function that reads it."""
    for key, value in arguments.items():
        if isinstance(value, Array):
            for axis in range(value.ndim):
                yield f"the size of {key}'s axis {axis}", lambda old, key=key, axis=axis: old[key].shape[axis]
        elif isinstance(value, int | float):
            yield key, lambda old, key=key: old[key]


def _find_factor(actual: Array, expected: Array) -> float | None:
    """Return the factor between two arrays if every finite number has it, and the others are equal."""
    if actual.shape != expected.shape or actual.dtype.kind != "f":
        return None
    is_finite = np.isfinite(actual) & np.isfinite(expected)
    if not np.array_equal(actual[~is_finite], expected[~is_finite], equal_nan=True):
        return None
    first, second = actual[is_finite].astype(np.float64), expected[is_finite].astype(np.float64)
    size = float(np.square(second).sum())
    factor = float((first * second).sum()) / size if size else 0.0
    error = np.abs(first - factor * second).max(initial=0.0)
    return factor if factor and error <= FACTOR_ERROR * np.abs(first).max() else None
