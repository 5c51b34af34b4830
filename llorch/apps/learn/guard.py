"""Checks around every call of a learner's function: arguments must stay unchanged, results must be usable.

Number, shape and dtype of the results must equal those of the reference for the same arguments. Their values are left
to the comparison with goldens. A live run (generation for a user) has no goldens: there NaN is a fault, and the
reference runs only once for each shape of the arguments.
"""

import operator
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from typing import Any

import numpy as np

from llorch.apps.learn.calling import call_function, check_parameters, find_wrong_dtype, forbid_recursion, format_error
from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.function_calls import CallRecord, FunctionCall
from llorch.runtime.errors import LearnerFault

Note = Callable[[str], None]
_KEY_BYTES = 1 << 16  # integer arrays up to this size are part of a cache key by value
Tensor = Any  # of torch, which only lesson 14 imports
ResultSpec = tuple[tuple[int, ...], np.dtype, bool]  # shape, dtype, has NaN: of a reference's result


def guard_function(
    exercise: Exercise, function: Call, *, note: Note = lambda line: None, record: CallRecord | None = None,
    live: bool = False,
) -> Call:  # fmt: skip
    """Wrap a learner's function in the checks of its exercise; `note` gets harmless observations.

    Calls are recorded in `record`, unless they are `live`.
    """
    if exercise.streams:
        return _guard_stream(exercise, function)
    if exercise.on_torch:
        return _guard_on_torch(exercise, function, note=note, record=record)
    specs: dict[object, list[ResultSpec]] = {}
    function = forbid_recursion(exercise, function)

    def call(**arguments: object) -> Any:
        key = _shape_key(arguments)
        if not specs:
            check_parameters(exercise, function, arguments)
        expected: tuple[np.ndarray, ...] = ()
        if not live or key not in specs:
            expected = run_reference(exercise, arguments)
            specs[key] = [(array.shape, array.dtype, _has_nan(array)) for array in expected]
        inputs = read_only(arguments, copy=not live)
        returned = call_function(exercise, function, inputs)
        if not live:
            _require_unchanged(exercise, arguments, inputs)
        arrays = _as_arrays(exercise, returned)  # first, because it checks the number of results
        if record is not None and not live and all(array.dtype.kind in "fiub" for array in arrays):
            record.add(exercise.name, key, FunctionCall(inputs, tuple(array.copy() for array in arrays), expected))
        for (name, value), array, spec in zip(exercise.results(returned).items(), arrays, specs[key], strict=True):
            if array.dtype != spec[1]:
                _require_inner_dtypes(exercise, function, inputs, f"its {name} is {array.dtype} too")
            _require_like(exercise, name, array, spec, value)
            _check_nan(exercise, name, array, spec, note=note, live=live)
        return arrays[0].copy() if len(arrays) == 1 else tuple(array.copy() for array in arrays)

    return call


def _require_inner_dtypes(exercise: Exercise, function: Call, arguments: Mapping[str, Any], result: str) -> None:
    """Raise LearnerFault for an inner function of the learner if its dtype is the first wrong one."""
    if fault := find_wrong_dtype(exercise, function, arguments):
        raise LearnerFault(fault[0], f"{fault[1]} ({exercise.name} calls it, and {result})")


def _guard_on_torch(exercise: Exercise, function: Call, *, note: Note, record: CallRecord | None) -> Call:
    """Wrap a function of torch tensors in its checks, because NumPy has no bfloat16; the function gets copies."""
    import torch  # only lesson 14 needs it

    function = forbid_recursion(exercise, function)

    def call(**arguments: Any) -> torch.Tensor:
        check_parameters(exercise, function, arguments)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        inputs = arguments | {name: tensor.clone() for name, tensor in tensors.items()}
        actual, expected = call_function(exercise, function, inputs), exercise.reference(**arguments)
        for name, tensor in tensors.items():
            if not torch.equal(tensor.nan_to_num(), inputs[name].nan_to_num()):
                raise LearnerFault(exercise.name, f"changed its argument {name}; compute into a new tensor")
        _require_like_tensor(exercise, actual, expected)
        if (nan := actual.isnan()).any() and not expected.isnan().any():
            note(f"{exercise.name}: {exercise.returns[0]} has {int(nan.sum())} NaN of {actual.numel()} numbers")
        if record is not None and actual.dtype == torch.float32:  # in bfloat16 no wrong function has the same roundings
            arrays = (tensor.detach().numpy().copy() for tensor in (actual, expected))
            record.add(exercise.name, object(), FunctionCall(inputs, *((array,) for array in arrays)))
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


def _guard_stream(exercise: Exercise, function: Call) -> Call:
    def call(**arguments: object) -> Iterator[int]:
        check_parameters(exercise, function, arguments)
        try:
            for token in function(**arguments):
                yield operator.index(token)
        except LearnerFault:
            raise  # of another exercise, whose function is in an argument
        except (Exception, SystemExit) as error:
            raise LearnerFault(exercise.name, f"raised {format_error(error)}") from error

    return call


def read_only(arguments: Mapping[str, Any], *, copy: bool) -> dict[str, Any]:
    """Make arguments read-only; `copy` also protects against native code that ignores this flag."""
    protected: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            value = read_only(value, copy=copy)
        elif isinstance(value, np.ndarray):
            value = value.copy() if copy and value.flags.writeable else value.view()  # a mapped file may be large
            value.flags.writeable = False
        protected[name] = value
    return protected


def run_reference(exercise: Exercise, arguments: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """Return the results of llorch's function of an exercise."""
    return tuple(map(np.asarray, exercise.results(exercise.reference(**arguments)).values()))


def _shape_key(value: object) -> object:
    """Return a key that decides the shapes of the results: all shapes, and the values of all but float arrays."""
    if isinstance(value, Mapping):
        return tuple((name, _shape_key(nested)) for name, nested in value.items())
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            return value.shape, value.dtype.str
        return (value.shape, value.dtype.str, value.tobytes()) if value.nbytes < _KEY_BYTES else object()  # always new
    return repr(value)


def _require_unchanged(exercise: Exercise, originals: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    for name, old in originals.items():
        new = inputs.get(name, old)
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


def _require_like(exercise: Exercise, name: str, actual: np.ndarray, spec: ResultSpec, returned: object) -> None:
    shape, dtype, _ = spec
    if actual.shape != shape:
        raise LearnerFault(exercise.name, f"expected {name} of shape {shape}, got {actual.shape}")
    if actual.dtype != dtype and (shape or not np.can_cast(actual.dtype, dtype)):
        if isinstance(returned, list | tuple):
            advice = f"got a {type(returned).__name__}; return an array: np.asarray({name}, np.{dtype})"
        else:
            advice = f"got {actual.dtype}; use .astype"
        raise LearnerFault(exercise.name, f"expected {name} of dtype {dtype}, {advice}")


def _check_nan(exercise: Exercise, name: str, array: np.ndarray, spec: ResultSpec, *, note: Note, live: bool) -> None:
    """Note NaN that the reference does not have; raise LearnerFault for it in a live run."""
    if spec[-1] or not _has_nan(array):
        return
    position = tuple(int(index[0]) for index in np.nonzero(np.isnan(array)))
    message = f"{name} has {np.isnan(array).sum()} NaN of {array.size} numbers, the first at {position}"
    if live:
        raise LearnerFault(exercise.name, message)
    note(f"{exercise.name}: {message}")


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any())
