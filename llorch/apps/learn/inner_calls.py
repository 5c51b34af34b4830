"""Parts that a learner's function calls: the first of them that returns another dtype than it should.

Nothing guards these calls, because a learner's file imports the functions of other lessons as they are. So the outer
function runs once more, with a profiler that sees what the functions of lesson files, or of its own module, return.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise

CallObserver = Callable[[FrameType, str, Any], None]


def of_other_dtype(outer: Exercise, function: Call, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first inner part that returns another dtype than its reference does.

    Args:
        outer: The part whose result has the wrong dtype.
        function: The learner's code for it.
        given: Its arguments.

    Returns:
        The name of the inner part and a sentence about it; None if every inner part is right or there is none.
    """
    home = getattr(inspect.unwrap(function), "__globals__", None)
    running: dict[FrameType, Mapping[str, Any]] = {}
    calls: list[tuple[Exercise, Mapping[str, Any], Any]] = []

    def observe(frame: FrameType, event: str, returned: Any) -> None:
        exercise = _part_of(frame, home) if event in ("call", "return") else None
        if exercise is None or exercise.name == outer.name:
            return
        if event == "call":
            running[frame] = _arguments(frame)
        elif (arguments := running.pop(frame, None)) is not None:
            calls.append((exercise, arguments, returned))

    with suppress(Exception), _profiled(observe):  # it has returned before
        function(**given)
    for exercise, arguments, returned in calls:
        for name, actual, right in _dtypes(exercise, arguments, returned):
            if actual != right:
                return exercise.name, f"expected {name} of dtype {right}, got {actual}; use .astype"
    return None


def _part_of(frame: FrameType, home: object) -> Exercise | None:
    """Find the part that a frame is: of a lesson file, or of the module or notebook that has the outer function."""
    from llorch.apps.learn.lessons import LESSON_OF, PARTS  # which import this module's callers

    exercise = PARTS.get(frame.f_code.co_name)
    if exercise is None or exercise.in_python_only:
        return None
    is_learners = frame.f_globals is home or frame.f_globals.get("__name__") == LESSON_OF[exercise.name].module
    return exercise if is_learners else None


def _arguments(frame: FrameType) -> Mapping[str, Any]:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    return {name: frame.f_locals[name] for name in names if name in frame.f_locals}


def _dtypes(
    exercise: Exercise, arguments: Mapping[str, Any], returned: Any
) -> Iterator[tuple[str, np.dtype, np.dtype]]:
    """Give each result's name, dtype and right dtype, as far as the reference takes the same arguments."""
    try:
        right, actual = exercise.results(exercise.reference(**arguments)), exercise.results(returned)
        yield from ((name, np.asarray(actual[name]).dtype, np.asarray(right[name]).dtype) for name in right)
    except (TypeError, ValueError, IndexError):  # another number of results
        return


@contextmanager
def _profiled(observe: CallObserver) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        yield
    finally:
        sys.setprofile(before)
