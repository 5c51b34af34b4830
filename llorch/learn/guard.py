"""Around every call of a learner's function: what it was given stays as it was, what it gives can be gone on with.

Shape, dtype and number of results are those of the reference for the same arguments; numbers are not looked at.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from llorch.learn.part import Call, Part


class LearnerFault(Exception):
    """A part that cannot be gone on with: it raised, or returned no array of the right shape and dtype.

    Attributes:
        part: Its name.
    """

    def __init__(self, part: str, said: str) -> None:
        """Of a part; the cause, where there is one, holds the learner's frames."""
        super().__init__(f"{part}: {said}")
        self.part = part


def guarded(part: Part, function: Call, *, note: Callable[[str], None] = lambda line: None) -> Call:
    """A learner's function behind its checks."""
    if part.streams:
        return _guarded_stream(part, function)

    def call(**given: Any) -> Any:
        before = copied(given)
        wanted = part.results(part.reference(**given))
        try:
            returned = function(**given)
        except NotImplementedError as error:
            raise LearnerFault(part.name, f"calls something that is not written yet ({error})") from error
        except (Exception, SystemExit) as error:
            raise LearnerFault(part.name, f"raised {type(error).__name__}: {error}") from error
        _require_unchanged(part, before, given)
        got = _as_arrays(part, returned)
        for name, array in got.items():
            _require_like(part, name, array, np.asarray(wanted[name]))
            if any(np.shares_memory(array, each) for each in _arrays(given)):
                note(f"{part.name}: {name} is a view of an argument; a copy is used")
        results = [array.copy() for array in got.values()]
        return results[0] if len(results) == 1 else tuple(results)

    return call


def _guarded_stream(part: Part, function: Call) -> Call:
    def call(**given: Any) -> Iterator[int]:
        try:
            for each in function(**given):
                yield operator.index(each)
        except LearnerFault:
            raise  # of another part, in what it was given
        except Exception as error:
            raise LearnerFault(part.name, f"raised {type(error).__name__}: {error}") from error

    return call


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that nobody else can change."""
    return {
        name: value.copy() if _can_change(value) else copied(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
    }


def _can_change(value: Any) -> bool:
    """Whether it is an array that can be written to; a mapped file cannot, and may be large."""
    return isinstance(value, np.ndarray) and value.flags.writeable


def _arrays(given: Mapping[str, Any]) -> list[np.ndarray]:
    found = []
    for value in given.values():
        found += _arrays(value) if isinstance(value, Mapping) else [value] if isinstance(value, np.ndarray) else []
    return found


def _require_unchanged(part: Part, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, old in before.items():
        new = after[name]
        if isinstance(old, Mapping):
            _require_unchanged(part, old, new)
        elif _can_change(new) and not np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
            raise LearnerFault(part.name, f"changed its argument {name}; compute into a new array")


def _as_arrays(part: Part, returned: Any) -> dict[str, np.ndarray]:
    n = len(part.returns)
    if n > 1 and not (isinstance(returned, tuple | list) and len(returned) == n):
        got = f"{len(returned)} results" if isinstance(returned, tuple | list) else type(returned).__name__
        raise LearnerFault(part.name, f"expected to return {n} arrays ({', '.join(part.returns)}), got {got}")
    if returned is None:
        raise LearnerFault(part.name, "returned None; does it end with return?")
    try:
        return {name: np.asarray(each) for name, each in part.results(returned).items()}
    except Exception as error:
        raise LearnerFault(part.name, f"returned what NumPy cannot read: {error}") from error


def _require_like(part: Part, name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    if got.shape != wanted.shape:
        raise LearnerFault(part.name, f"expected {name} of shape {wanted.shape}, got {got.shape}")
    if got.dtype != wanted.dtype and (wanted.ndim or not np.can_cast(got.dtype, wanted.dtype)):
        raise LearnerFault(part.name, f"expected {name} of dtype {wanted.dtype}, got {got.dtype}; use .astype")
