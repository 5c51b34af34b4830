"""One call of a learner's function: its parameters, its errors, the functions that it calls and the one it replaces.

Nothing guards the calls of inner functions, because a learner's file imports the functions of other lessons as they
are. To find one that returns another dtype, the outer function runs once more, with a profiler that sees what the
functions of lesson files, or of its own module, return. Tracebacks show the lines of the learner's code alone.
"""

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.runtime.errors import LearnerFault


def not_within_itself(exercise: Exercise, function: Call) -> Call:
    """Refuse a learner's function that calls the llorch function it replaces: that call would come back to it."""
    is_running = False

    @functools.wraps(function)
    def call(**given: object) -> Any:
        nonlocal is_running
        if is_running:
            raise LearnerFault(
                exercise.name, f"calls {exercise.replaces}, the function that it replaces; compute the result yourself"
            )
        is_running = True
        try:
            return function(**given)
        finally:
            is_running = False

    return call


def named(error: BaseException) -> str:
    """Return `ValueError: its message`, or the name alone if there is no message."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def require_parameters(exercise: Exercise, function: Call, given: Mapping[str, Any]) -> None:
    """Raise LearnerFault where a function has other parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # it does not say
    try:
        signature.bind(**given)
    except TypeError as error:
        raise LearnerFault(
            exercise.name, f"expected the parameters ({', '.join(given)}), got {signature}: {error}"
        ) from None


def called(exercise: Exercise, function: Call, handed: Mapping[str, Any]) -> Any:
    """Call a function and return its result; LearnerFault for anything that it raised."""
    try:
        return function(**handed)
    except LearnerFault:
        raise
    except NotImplementedError as error:
        said = f" ({error})" if str(error) else ""
        raise LearnerFault(exercise.name, f"calls a function that is not written yet{said}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and "read-only" in str(error):
            raise LearnerFault(exercise.name, f"writes into an argument ({error}); compute into a new array") from error
        raise LearnerFault(exercise.name, f"raised {named(error)}") from error


CallObserver = Callable[[FrameType, str, Any], None]


def of_other_dtype(outer: Exercise, function: Call, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first inner part of a wrong one that returns another dtype than its reference does.

    Return the name of the inner part and a sentence about it; None if every inner part is right or there is none.
    """
    home = getattr(inspect.unwrap(function), "__globals__", None)
    running: dict[FrameType, Mapping[str, Any]] = {}
    calls: list[tuple[Exercise, Mapping[str, Any], Any]] = []

    def observe(frame: FrameType, event: str, returned: object) -> None:
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
    exercise: Exercise, arguments: Mapping[str, Any], returned: object
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


_PACKAGES = ("site-packages", "dist-packages")  # of an environment may lie in another one, which it sees
_OF_OTHERS = (
    Path(__file__).parents[2],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    *(Path(place) for place in sys.path if Path(place).name in _PACKAGES),
)
_SHOWN = 6  # frames; of a recursion without end there are a thousand


def own_frames(error: BaseException) -> list[str]:
    """List file, line and text of every frame in the learner's code, the outermost first."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 0, "", line=error.text or ""))
    lines = [f"{_near(frame.filename)}:{frame.lineno}  {frame.line or ''}".rstrip() for frame in frames]
    if len(lines) > _SHOWN:
        half = _SHOWN // 2
        lines[half:-half] = [f"({len(lines) - _SHOWN} more)"]
    return lines


def all_frames(error: BaseException) -> str:
    """Format the traceback as Python prints it, with causes."""
    return "".join(traceback.format_exception(error)).rstrip()


def is_own(file: str) -> bool:
    """Tell if a file belongs neither to llorch nor to a library."""
    return not file.startswith("<") and not any(Path(file).is_relative_to(place) for place in _OF_OTHERS)


def _near(file: str) -> str:
    """Relative to where the command runs, if it lies below."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
