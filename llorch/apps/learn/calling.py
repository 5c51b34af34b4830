"""One call of a learner's function: its parameters, its errors, its inner calls, and the function that it replaces.

A learner's function may call the learner's functions of other lessons, directly and without the checks of `guard`. To
find such an inner function with a wrong dtype, the outer function runs again with a profiler. The profiler observes
returns of functions in lesson files and in the outer function's module. Tracebacks show only lines of learner's code.
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


def forbid_recursion(exercise: Exercise, function: Call) -> Call:
    """Make a learner's function fail if it calls the llorch function that it replaces: it would call itself."""
    is_running = False

    @functools.wraps(function)
    def call(**arguments: object) -> Any:
        nonlocal is_running
        if is_running:
            raise LearnerFault(
                exercise.name, f"calls {exercise.replaces}, the function that it replaces; compute the result yourself"
            )
        is_running = True
        try:
            return function(**arguments)
        finally:
            is_running = False

    return call


def format_error(error: BaseException) -> str:
    """Format an error as `ValueError: its message`, or as its class name if there is no message."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def check_parameters(exercise: Exercise, function: Call, arguments: Mapping[str, Any]) -> None:
    """Raise LearnerFault if a function does not accept these arguments by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # it has no signature to check
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise LearnerFault(
            exercise.name, f"expected the parameters ({', '.join(arguments)}), got {signature}: {error}"
        ) from None


def call_function(exercise: Exercise, function: Call, arguments: Mapping[str, Any]) -> Any:
    """Call a function and return its result; turn every error into a LearnerFault."""
    try:
        return function(**arguments)
    except LearnerFault:
        raise
    except NotImplementedError as error:
        detail = f" ({error})" if str(error) else ""
        raise LearnerFault(exercise.name, f"calls a function that is not written yet{detail}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and "read-only" in str(error):
            raise LearnerFault(exercise.name, f"writes into an argument ({error}); compute into a new array") from error
        raise LearnerFault(exercise.name, f"raised {format_error(error)}") from error


CallObserver = Callable[[FrameType, str, Any], None]  # (frame, event, returned value), see sys.setprofile


def find_wrong_dtype(outer: Exercise, function: Call, outer_arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first exercise, called by `function`, that returns another dtype than its reference.

    Return the name of the inner exercise and a sentence about it; None if every inner exercise has the right dtype.
    """
    outer_globals = getattr(inspect.unwrap(function), "__globals__", None)
    running: dict[FrameType, Mapping[str, Any]] = {}
    calls: list[tuple[Exercise, Mapping[str, Any], Any]] = []

    def observe(frame: FrameType, event: str, returned: object) -> None:
        exercise = _find_exercise(frame, outer_globals) if event in ("call", "return") else None
        if exercise is None or exercise.name == outer.name:
            return
        if event == "call":
            running[frame] = _read_arguments(frame)
        elif (arguments := running.pop(frame, None)) is not None:
            calls.append((exercise, arguments, returned))

    with suppress(Exception), _profile(observe):  # an error here is not reported: the first run returned
        function(**outer_arguments)
    for exercise, arguments, returned in calls:
        for name, actual, expected in _compare_dtypes(exercise, arguments, returned):
            if actual != expected:
                return exercise.name, f"expected {name} of dtype {expected}, got {actual}; use .astype"
    return None


def _find_exercise(frame: FrameType, outer_globals: object) -> Exercise | None:
    """Find the exercise that a frame runs, in a lesson file or in the module or notebook of the outer function."""
    from llorch.apps.learn.lessons import LESSON_OF, PARTS  # here, because `lessons` imports users of this module

    exercise = PARTS.get(frame.f_code.co_name)
    if exercise is None or exercise.in_python_only:
        return None
    is_learners = frame.f_globals is outer_globals or frame.f_globals.get("__name__") == LESSON_OF[exercise.name].module
    return exercise if is_learners else None


def _read_arguments(frame: FrameType) -> Mapping[str, Any]:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    return {name: frame.f_locals[name] for name in names if name in frame.f_locals}


def _compare_dtypes(
    exercise: Exercise, arguments: Mapping[str, Any], returned: object
) -> Iterator[tuple[str, np.dtype, np.dtype]]:
    """Yield each result's name, dtype and expected dtype, if the reference accepts the same arguments."""
    try:
        expected, actual = exercise.results(exercise.reference(**arguments)), exercise.results(returned)
        yield from ((name, np.asarray(actual[name]).dtype, np.asarray(expected[name]).dtype) for name in expected)
    except (TypeError, ValueError, IndexError):  # another number of results, or arguments that the reference refuses
        return


@contextmanager
def _profile(observe: CallObserver) -> Iterator[None]:
    earlier_profiler = sys.getprofile()
    sys.setprofile(observe)
    try:
        yield
    finally:
        sys.setprofile(earlier_profiler)


_PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # one environment may import from the folder of another
_LIBRARY_FOLDERS = (
    Path(__file__).parents[2],  # llorch
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    *(Path(place) for place in sys.path if Path(place).name in _PACKAGE_FOLDERS),
)
_MAX_FRAMES = 6  # lines of a traceback; an endless recursion has a thousand frames


def own_frames(error: BaseException) -> list[str]:
    """List file, line and text of every frame in the learner's code, the outermost first."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_learner_file(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_learner_file(error.filename):
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 0, "", line=error.text or ""))
    lines = [f"{_relative_path(frame.filename)}:{frame.lineno}  {frame.line or ''}".rstrip() for frame in frames]
    if len(lines) > _MAX_FRAMES:
        half = _MAX_FRAMES // 2
        lines[half:-half] = [f"({len(lines) - _MAX_FRAMES} more)"]
    return lines


def all_frames(error: BaseException) -> str:
    """Format the traceback as Python prints it, with causes."""
    return "".join(traceback.format_exception(error)).rstrip()


def is_learner_file(file: str) -> bool:
    """Tell if a file belongs to neither llorch nor a library."""
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def _relative_path(file: str) -> str:
    """Return a path, relative to the working directory if it is inside."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
