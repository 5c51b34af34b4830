"""One call of a learner's function: its parameters, the errors that it raises, and the function that it replaces."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from llorch.apps.learn.exercise import Call, Exercise
from llorch.runtime.errors import LearnerFault


def not_within_itself(exercise: Exercise, function: Call) -> Call:
    """Refuse a learner's function that calls the llorch function it replaces: that call would come back to it."""
    is_running = False

    @functools.wraps(function)
    def call(**given: Any) -> Any:
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
