"""Around every call of a learner's function: what it is given stays as it was, what it gives can be gone on with.

Number, shape and dtype of the results are those of the reference for the same arguments. Numbers are the judge's; in a
live run, where nothing is judged, NaN is a fault, and the reference runs once for each shape of the arguments.
"""

import operator
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from typing import Any

import numpy as np

from llorch.apps.learn.calling import called, named, not_within_itself, of_other_dtype, require_parameters
from llorch.apps.learn.exercise import Call, Exercise
from llorch.runtime.errors import LearnerFault

Note = Callable[[str], None]
_SMALL = 1 << 16  # bytes
Tensor = Any  # of torch, which only lesson 14 imports
Like = tuple[tuple[int, ...], np.dtype, bool]  # shape, dtype, whether it has NaN


def guarded(exercise: Exercise, function: Call, *, note: Note = lambda line: None, live: bool = False) -> Call:
    """Wrap a learner's function in its checks."""
    if exercise.streams:
        return _guarded_stream(exercise, function)
    if exercise.on_torch:
        return _guarded_on_torch(exercise, function, note=note)
    known: dict[object, list[Like]] = {}
    function = not_within_itself(exercise, function)

    def call(**given: object) -> Any:
        key = _shape_facts(given) if live else None
        if not known:
            require_parameters(exercise, function, given)
        if not live or key not in known:
            known[key] = _wanted(exercise, given)
        handed = read_only(given, copy=not live)
        returned = called(exercise, function, handed)
        if not live:
            _require_unchanged(exercise, given, handed)
        arrays = _as_arrays(exercise, returned)  # counts them
        for (name, value), array, like in zip(exercise.results(returned).items(), arrays, known[key], strict=True):
            if array.dtype != like[1]:
                _require_inner_dtypes(exercise, function, handed, f"its {name} is {array.dtype} too")
            _require_like(exercise, name, array, like, value)
            _require_numbers(exercise, name, array, like, note=note, live=live)
            if any(np.shares_memory(array, argument) for argument in _arrays(handed)):
                note(f"{exercise.name}: {name} is a view of an argument; the check uses a copy")
        return arrays[0].copy() if len(arrays) == 1 else tuple(array.copy() for array in arrays)

    return call


def _require_inner_dtypes(exercise: Exercise, function: Call, handed: Mapping[str, Any], result: str) -> None:
    """Raise LearnerFault for a function that the learner's one calls, if that has the wrong dtype first."""
    if inner := of_other_dtype(exercise, function, handed):
        raise LearnerFault(inner[0], f"{inner[1]} ({exercise.name} calls it, and {result})")


def _guarded_on_torch(exercise: Exercise, function: Call, *, note: Note) -> Call:
    """Wrap a function of tensors in its checks, as NumPy has no bfloat16; the function is given copies."""
    import torch  # which only lesson 14 needs

    function = not_within_itself(exercise, function)

    def call(**given: Any) -> torch.Tensor:
        require_parameters(exercise, function, given)
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        handed = given | {name: tensor.clone() for name, tensor in tensors.items()}
        actual, expected = called(exercise, function, handed), exercise.reference(**given)
        for name, tensor in tensors.items():
            if not torch.equal(tensor.nan_to_num(), handed[name].nan_to_num()):
                raise LearnerFault(exercise.name, f"changed its argument {name}; compute into a new tensor")
        _require_like_tensor(exercise, actual, expected)
        if (nan := actual.isnan()).any() and not expected.isnan().any():
            note(f"{exercise.name}: {exercise.returns[0]} has {int(nan.sum())} NaN of {actual.numel()} numbers")
        return actual.contiguous()

    return call


def _require_like_tensor(exercise: Exercise, actual: Tensor, expected: Tensor) -> None:
    name = exercise.returns[0]
    if not isinstance(actual, type(expected)):
        raise LearnerFault(exercise.name, f"expected {name} to be a torch tensor, got {type(actual).__name__}")
    if actual.shape != expected.shape:
        raise LearnerFault(
            exercise.name, f"expected {name} of shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        )
    if actual.dtype != expected.dtype:
        raise LearnerFault(
            exercise.name, f"expected {name} of dtype {expected.dtype}, got {actual.dtype}; end with .to(x.dtype)"
        )
    if actual.device != expected.device:
        raise LearnerFault(
            exercise.name, f"expected {name} on {expected.device}, got {actual.device}; make it with x.device"
        )


def _guarded_stream(exercise: Exercise, function: Call) -> Call:
    def call(**given: object) -> Iterator[int]:
        require_parameters(exercise, function, given)
        try:
            for each in function(**given):
                yield operator.index(each)
        except LearnerFault:
            raise  # of another part, in what it was given
        except (Exception, SystemExit) as error:
            raise LearnerFault(exercise.name, f"raised {named(error)}") from error

    return call


def read_only(given: Mapping[str, Any], *, copy: bool) -> dict[str, Any]:
    """Make arguments read-only, now and later; `copy` for code that writes to memory without a check."""
    handed: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            value = read_only(value, copy=copy)
        elif isinstance(value, np.ndarray):
            value = value.copy() if copy and value.flags.writeable else value.view()  # a mapped file may be large
            value.flags.writeable = False
        handed[name] = value
    return handed


def _wanted(exercise: Exercise, given: Mapping[str, Any]) -> list[Like]:
    results = exercise.results(exercise.reference(**given)).values()
    return [(array.shape, array.dtype, _has_nan(array)) for array in map(np.asarray, results)]


def _shape_facts(value: object) -> object:
    """Return the facts that decide the shapes of results: shapes, and the values of everything that is not a float."""
    if isinstance(value, Mapping):
        return tuple((name, _shape_facts(each)) for name, each in value.items())
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            return value.shape, value.dtype.str
        return (value.shape, value.dtype.str, value.tobytes()) if value.nbytes < _SMALL else object()  # not seen before
    return repr(value)


def _require_unchanged(exercise: Exercise, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, old in before.items():
        new = after.get(name, old)
        if isinstance(old, Mapping):
            _require_unchanged(exercise, old, new)
        elif (
            isinstance(old, np.ndarray)
            and old.flags.writeable
            and not np.array_equal(old, new, equal_nan=old.dtype.kind == "f")
        ):
            raise LearnerFault(exercise.name, f"changed its argument {name}; compute into a new array")


def _as_arrays(exercise: Exercise, returned: object) -> list[np.ndarray]:
    n = len(exercise.returns)
    if returned is None:
        raise LearnerFault(exercise.name, "expected a result, got None; end the function with return")
    if isinstance(returned, Coroutine | Generator):
        returned.close()
        word = "async def" if isinstance(returned, Coroutine) else "yield"
        raise LearnerFault(exercise.name, f"is written with {word}; expected a plain function that returns its results")
    if n > 1 and not (isinstance(returned, tuple | list) and len(returned) == n):
        actual = f"{len(returned)} results" if isinstance(returned, tuple | list) else type(returned).__name__
        raise LearnerFault(
            exercise.name, f"expected to return {n} arrays ({', '.join(exercise.returns)}), got {actual}"
        )
    return [_as_array(exercise, name, value) for name, value in exercise.results(returned).items()]


def _as_array(exercise: Exercise, name: str, value: object) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise LearnerFault(exercise.name, f"returned a value that NumPy cannot read as {name}: {error}") from error
    if array.dtype == object:
        raise LearnerFault(
            exercise.name, f"expected {name} to be an array of numbers, got {type(value).__name__} of objects"
        )
    return array


def _require_like(exercise: Exercise, name: str, actual: np.ndarray, like: Like, returned: object) -> None:
    shape, dtype, _ = like
    if actual.shape != shape:
        raise LearnerFault(exercise.name, f"expected {name} of shape {shape}, got {actual.shape}")
    if actual.dtype != dtype and (shape or not np.can_cast(actual.dtype, dtype)):
        if isinstance(returned, list | tuple):
            advice = f"got a {type(returned).__name__}; return an array: np.asarray({name}, np.{dtype})"
        else:
            advice = f"got {actual.dtype}; use .astype"
        raise LearnerFault(exercise.name, f"expected {name} of dtype {dtype}, {advice}")


def _require_numbers(exercise: Exercise, name: str, array: np.ndarray, like: Like, *, note: Note, live: bool) -> None:
    """Note NaN where the reference has none, or raise LearnerFault in a live run."""
    if like[-1] or not _has_nan(array):
        return
    at = tuple(int(index[0]) for index in np.nonzero(np.isnan(array)))
    said = f"{name} has {np.isnan(array).sum()} NaN of {array.size} numbers, the first at {at}"
    if live:
        raise LearnerFault(exercise.name, said)
    note(f"{exercise.name}: {said}")


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def _arrays(given: Mapping[str, Any]) -> list[np.ndarray]:
    found = []
    for value in given.values():
        found += _arrays(value) if isinstance(value, Mapping) else [value] if isinstance(value, np.ndarray) else []
    return found
