"""Explain the wrong results of a learner's function: find a wrong function that returns the same numbers.

Every recorded call is compared: one with right results, too, contradicts a wrong function that fails there. Candidates
are the known mistakes, mistakes of beginners, and the right function with altered arguments or results.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from llorch.apps.learn.alterations import make_alterations
from llorch.apps.learn.beginners import BEGINNERS
from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.function_calls import FunctionCall, Results
from llorch.apps.learn.lessons import LESSON_OF, typed_mistakes
from llorch.apps.learn.small_cases import take_tokens
from llorch.diagnosis.mistakes import MISTAKES
from llorch.judging.types import Cause

Compute = Callable[[FunctionCall], Results]
Candidate = tuple[str, str, Compute]  # name, sentence, and results for a call


def find_causes(exercise: Exercise, calls: Sequence[FunctionCall], function: Call) -> list[Cause]:
    """Find the wrong functions that return the learner's results in all calls; empty if none does, or none is wrong.

    Args:
        exercise: The exercise.
        calls: Recorded calls, the smallest first.
        function: The learner's function.
    """
    first = next((call for call in calls if call.is_clear), None)
    if first is None:
        return []
    if _is_random(exercise, first, function):
        return [Cause("results-change", "mistake", CHANGING.format(exercise.name), exercise.stages, 1.0, 0.0)]
    causes = _find_matches(exercise, _known(exercise), first, calls)
    if causes or exercise.streams:
        return causes
    return _find_matches(exercise, _altered(exercise, first), first, calls)[:1]  # others say the same in other words


CHANGING = "{} returns another result if it gets the same arguments again: it keeps a state or draws random numbers."


def _find_matches(
    exercise: Exercise, candidates: Iterator[Candidate], first: FunctionCall, calls: Sequence[FunctionCall]
) -> list[Cause]:
    """Return the candidates that reproduce all calls: only those with the same bits, if there are any."""
    matches = [
        (Cause(name, "mistake", sentence, exercise.stages, 1.0, 0.0), compute)
        for name, sentence, compute in candidates
        if all(_reproduces(call, compute) for call in (first, *calls))
    ]
    exact = [cause for cause, compute in matches if all(_equals(call, compute) for call in calls)]
    return exact or [cause for cause, _ in matches]


def _is_random(exercise: Exercise, call: FunctionCall, function: Call) -> bool:
    """Tell if the function returns other results for the arguments of a recorded call."""
    try:
        returned = function(**call.arguments)
        returned = take_tokens(returned, call.arguments) if exercise.streams else returned
        results = exercise.results(returned).values()
    except Exception:
        return False
    return not all(
        np.array_equal(*pair, equal_nan=True) for pair in zip(map(np.asarray, results), call.actual, strict=True)
    )


def _reproduces(call: FunctionCall, compute: Compute) -> bool:
    """Tell if a candidate has the learner's results in a call; one that raises an error has not."""
    try:
        with np.errstate(all="ignore"):
            return call.is_reproduced_by(compute(call))
    except Exception:  # a candidate may refuse altered arguments in any way
        return False


def _equals(call: FunctionCall, compute: Compute) -> bool:
    """Tell if a candidate that reproduces a call has the learner's results to the last bit."""
    with np.errstate(all="ignore"):
        return all(np.array_equal(*pair, equal_nan=True) for pair in zip(compute(call), call.actual, strict=True))


def _known(exercise: Exercise) -> Iterator[Candidate]:
    """Yield name, sentence and results of known mistakes, then of beginners' mistakes."""

    def compute(wrong: Call, call: FunctionCall) -> Results:
        returned = wrong(**call.arguments)
        if exercise.streams:
            returned = take_tokens(returned, call.arguments)
        return tuple(map(np.asarray, exercise.results(returned).values()))

    for name, wrong in typed_mistakes(LESSON_OF[exercise.name]).get(exercise.name, {}).items():
        yield name, MISTAKES[name].diagnosis, partial(compute, wrong)
    for wrong in BEGINNERS.get(exercise.name, ()):
        yield wrong.__name__.replace("_", "-"), " ".join((wrong.__doc__ or "").split()), partial(compute, wrong)


def _altered(exercise: Exercise, first: FunctionCall) -> Iterator[Candidate]:
    """Yield name, sentence and results of the right function with altered arguments or results."""
    for alteration in make_alterations(exercise, first):
        sentence = f"{exercise.name} returns what the right function returns if {alteration.condition}."
        yield alteration.name, sentence, alteration.compute
