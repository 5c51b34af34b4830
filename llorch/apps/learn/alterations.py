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
CONSTANTS = (
    1e-8,
    float(np.finfo(np.float32).eps),
    1e-6,
    1e-5,
    1.0,
    10000.0,
    500000.0,
    1000000.0,
)  # usual values of eps and of the base of RoPE
FACTOR_ERROR = 1e-5  # largest relative difference of a number from a factor times the right one


@dataclass(frozen=True)
class Alteration:
    """A wrong function.

    Attributes:
        name: Short name, `gate-and-up-exchanged`.
        condition: Continues "your function returns what the right one returns if ...".
        compute: Returns its results for the arguments and the right results of a call.
    """

    name: str
    condition: str
    compute: Callable[[Arguments, Results], Results]


def make_alterations(exercise: Exercise, call: FunctionCall) -> Iterator[Alteration]:
    """Make the alterations that fit the arguments and results of a call."""
    for name, condition, change in _argument_changes(call.arguments):

        def compute(arguments: Arguments, results: Results, change: Any = change) -> Results:
            return run_reference(exercise, {**arguments, **change(arguments)})

        yield Alteration(name, condition, compute)
    yield from _result_changes(exercise, call)


Change = Callable[[Arguments], Arguments]  # returns the changed arguments


def _argument_changes(arguments: Arguments) -> Iterator[tuple[str, str, Change]]:
    """Yield name, condition and change of arguments."""
    for name, value in arguments.items():
        for change_name, condition, change in _value_changes(name, value):
            yield change_name, condition, lambda old, name=name, change=change: {name: change(old[name])}
    shapes = {name: value.shape for name, value in arguments.items() if isinstance(value, Array)}
    scalars = [name for name, value in arguments.items() if isinstance(value, float)]
    alike = [pair for pair in combinations(shapes, 2) if shapes[pair[0]] == shapes[pair[1]]]
    for first, second in [*alike, *combinations(scalars, 2)]:
        yield (
            f"{first}-and-{second}-exchanged", f"{first} and {second} are exchanged",
            lambda old, first=first, second=second: {first: old[second], second: old[first]},
        )  # fmt: skip
        for source, target in ((first, second), (second, first)):
            yield (
                f"{source}-for-{target}", f"{source} stands in place of {target}",
                lambda old, source=source, target=target: {target: old[source]},
            )  # fmt: skip


def _value_changes(name: str, value: object) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Yield name, condition and change of one argument's value."""
    if isinstance(value, bool):
        yield f"not-{name}", f"{name} is {not value}", lambda old: not old
    elif isinstance(value, int | np.integer):
        for step in (1, -1):
            yield (
                f"{name}-{step:+d}",
                f"{name} is {abs(step)} {'larger' if step > 0 else 'smaller'}",
                (lambda old, step=step: old + step),
            )
        yield f"{name}-doubled", f"{name} is twice as large", lambda old: 2 * old
        yield f"{name}-halved", f"{name} is half as large", lambda old: old // 2
        yield f"{name}-missing", f"{name} is 0", lambda old: 0
    elif isinstance(value, float):
        yield f"{name}-missing", f"{name} is 0", lambda old: 0.0
        for constant in CONSTANTS:
            yield f"{name}-is-{constant:g}", f"{name} is always {constant:g}", lambda old, constant=constant: constant
        yield f"{name}-squared", f"{name} is squared", lambda old: old * old
        yield f"{name}-root", f"the root of {name} is taken", lambda old: abs(old) ** 0.5
        yield f"{name}-inverted", f"{name} is inverted, 1 / {name}", lambda old: 1 / old if old else old
        yield f"{name}-negated", f"{name} has the other sign", lambda old: -old
        yield f"{name}-doubled", f"{name} is twice as large", lambda old: 2 * old
        yield f"{name}-halved", f"{name} is half as large", lambda old: old / 2
        yield f"one-minus-{name}", f"1 - {name} stands in place of {name}", lambda old: 1 - old
    elif isinstance(value, Array) and value.size:
        yield from _array_changes(name, value)


def _array_changes(name: str, value: Array) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Yield name, condition and change of an array; optional arrays may be None in another call."""

    def of_array(change: Callable[[Array], Array]) -> Callable[[Any], Any]:
        return lambda old: change(old) if isinstance(old, Array) else old

    yield f"{name}-not-used", f"{name} is not used, as if it were 0", of_array(np.zeros_like)
    yield f"{name}-is-one", f"{name} is not used, as if it were 1", of_array(np.ones_like)
    if value.dtype.kind == "f":
        yield f"{name}-negated", f"{name} has the other sign", of_array(np.negative)
        yield f"{name}-plus-one", f"1 is added to {name}", of_array(lambda old: old + 1)
        for change_name, words, function in FUNCTIONS:
            yield f"{change_name}-of-{name}", f"{words} of {name} stands in place of {name}", of_array(function)
    elif value.dtype.kind in "iu":
        yield f"{name}-plus-one", f"{name} is 1 larger", of_array(lambda old: old + 1)
        yield f"{name}-minus-one", f"{name} is 1 smaller", of_array(lambda old: old - 1)
        yield f"{name}-byte-order", f"the bytes of {name} are in the other order", of_array(lambda old: old.byteswap())
    for axis in range(value.ndim):
        label = f" along axis {axis}" if value.ndim > 1 else ""
        yield (
            f"{name}-reversed-{axis}",
            f"{name} is reversed{label}",
            of_array(lambda old, axis=axis: np.flip(old, axis)),
        )
        for step in (1, -1):
            yield (
                f"{name}-shifted-{axis}-by-{step:+d}",
                f"{name} is shifted by {step:+d}{label}",
                of_array(lambda old, axis=axis, step=step: np.roll(old, step, axis)),
            )
    for first, second in combinations(range(value.ndim), 2):
        yield (
            f"{name}-transposed-{first}-{second}",
            f"axes {first} and {second} of {name} are exchanged",
            of_array(lambda old, first=first, second=second: np.swapaxes(old, first, second)),
        )


def _result_changes(exercise: Exercise, call: FunctionCall) -> Iterator[Alteration]:
    """Yield alterations of the results: one result alone, or their order."""
    for index, name in enumerate(exercise.returns):
        for change_name, condition, change in _changes_of_result(name, call, index):

            def compute(arguments: Arguments, results: Results, index: int = index, change: Any = change) -> Results:
                return *results[:index], change(results[index], arguments), *results[index + 1 :]

            yield Alteration(change_name, condition, compute)
    for first, second in combinations(range(len(exercise.returns)), 2):
        names = exercise.returns[first], exercise.returns[second]

        def exchange(arguments: Arguments, results: Results, first: int = first, second: int = second) -> Results:
            order = [*range(len(results))]
            order[first], order[second] = second, first
            return tuple(results[index] for index in order)

        yield Alteration(f"{'-and-'.join(names)}-exchanged", f"{' and '.join(names)} are exchanged", exchange)


ResultChange = Callable[[Array, Arguments], Array]


def _changes_of_result(name: str, call: FunctionCall, index: int) -> Iterator[tuple[str, str, ResultChange]]:
    """Yield name, condition and change of one result."""
    expected = call.expected[index]
    if expected.dtype.kind != "f":
        for step in (1, -1):
            yield (
                f"{name}-{step:+d}",
                f"{name} is {'1 larger' if step > 0 else '1 smaller'}",
                (lambda result, arguments, step=step: result + step),
            )
    if (factor := _find_factor(call.actual[index], expected)) is not None:
        yield (
            f"{name}-times-{factor:.4g}",
            f"{name} is multiplied by {factor:.6g}",
            (lambda result, arguments, factor=factor: result * result.dtype.type(factor)),
        )
    for change_name, condition, function in FUNCTIONS:
        yield (
            f"{name}-{change_name}",
            f"{condition} of {name} is taken at the end",
            (lambda result, arguments, function=function: function(result)),
        )
    for axis in range(expected.ndim):
        label = f" along axis {axis}" if expected.ndim > 1 else ""
        yield (
            f"{name}-reversed-{axis}",
            f"{name} is reversed{label}",
            (lambda result, arguments, axis=axis: np.flip(result, axis)),
        )
        for step in (1, -1):
            yield (
                f"{name}-shifted-{axis}-by-{step:+d}",
                f"{name} is shifted by {step:+d}{label}",
                (lambda result, arguments, axis=axis, step=step: np.roll(result, step, axis)),
            )
    yield from _changes_with_argument(name, call.arguments, expected)


def _changes_with_argument(name: str, arguments: Arguments, expected: Array) -> Iterator[tuple[str, str, ResultChange]]:
    """Yield changes that combine a result with an argument of its shape, and the argument alone."""
    for key, value in arguments.items():
        if not isinstance(value, Array) or value.shape != expected.shape or value.dtype != expected.dtype:
            continue
        yield f"{key}-unchanged", f"it returns {key} as it is", lambda result, arguments, key=key: arguments[key]
        yield f"{key}-added", f"{key} is added to {name}", lambda result, arguments, key=key: result + arguments[key]
        yield (
            f"{key}-subtracted",
            f"{key} is subtracted from {name}",
            (lambda result, arguments, key=key: result - arguments[key]),
        )
        yield (
            f"{key}-multiplied",
            f"{name} is multiplied by {key}",
            (lambda result, arguments, key=key: result * arguments[key]),
        )


def _softmax(array: Array) -> Array:
    weights = np.exp(array - array.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


FUNCTIONS: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (  # name, words, function
    ("squared", "the square", np.square),
    ("root", "the root", np.sqrt),
    ("inverted", "the inverse", np.reciprocal),
    ("absolute", "the absolute value", np.abs),
    ("exponential", "the exponential", np.exp),
    ("logarithm", "the logarithm", np.log),
    ("softmax", "the softmax", lambda array: _softmax(array) if array.ndim else array),
    ("above-zero", "the part above 0", lambda array: np.maximum(array, 0)),
    ("truncated", "the whole number", np.trunc),
    ("one-minus", "1 minus the value", lambda array: 1 - array),
    ("sigmoid", "the sigmoid", lambda array: 1 / (1 + np.exp(-array))),
    ("tanh", "the tanh", np.tanh),
    ("float16", "the float16 rounding", lambda array: array.astype(np.float16).astype(array.dtype)),
)


def _find_factor(actual: Array, expected: Array) -> float | None:
    """Return the factor between two arrays if every number has it."""
    if actual.shape != expected.shape or not np.isfinite(actual).all() or not np.isfinite(expected).all():
        return None
    first, second = actual.astype(np.float64), expected.astype(np.float64)
    size = float(np.square(second).sum())
    factor = float((first * second).sum()) / size if size else 0.0
    error = np.abs(first - factor * second).max(initial=0.0)
    return factor if factor and error <= FACTOR_ERROR * np.abs(first).max() else None
