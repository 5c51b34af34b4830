"""Mistakes of beginners: a check sees every one, gives it its own name, and its results are those in `beginners.json`.

No engine makes these mistakes, so nothing else tells whether a sentence still describes its function. The file has two
numbers of each function's results. Read a function and its sentence before you write it anew:

    WRITE_RESULTS=1 pytest -n 0 -m "not gpu" tests/apps/learn/test_beginners.py
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch.apps.learn.beginners import BEGINNERS
from llorch.apps.learn.check import check
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.function_calls import FunctionCall
from llorch.apps.learn.lessons import LESSON_OF, LESSONS, PARTS, Lesson
from llorch.apps.learn.small_cases import take_tokens
from llorch.apps.learn.wrong_functions import find_causes

STORED = Path(__file__).with_name("beginners.json")
ON_NUMPY = [lesson for lesson in LESSONS if not lesson.on_torch]
TOLERANCE = 1e-3  # of the norm: arguments come from other functions, which round differently on other processors


def wrong_calls(lesson: Lesson) -> Iterator[tuple[str, Callable[..., Any], list[FunctionCall]]]:
    """Yield every mistake of a lesson, and its calls with the arguments that a check of the right functions records."""
    exercises = [exercise for exercise in lesson.parts if exercise.name in BEGINNERS]
    references = {e.name: (lambda e=e, **arguments: e.reference(**arguments)) for e in exercises}
    implementation = Implementation("x", references)
    check(lesson, implementation)
    for exercise in exercises:
        for wrong in BEGINNERS[exercise.name]:
            yield exercise.name, wrong, list(call_again(wrong, implementation.calls.of(exercise.name), exercise.name))


def call_again(wrong: Callable[..., Any], calls: list[FunctionCall], name: str) -> Iterator[FunctionCall]:
    """Call a wrong function with recorded arguments, but for those that it refuses."""
    for right in calls:
        try:
            with np.errstate(all="ignore"):
                results = [results_of(name, function, right.arguments) for function in (wrong, PARTS[name].reference)]
                yield FunctionCall(right.arguments, *results)
        except (IndexError, ValueError, AttributeError, TypeError):
            continue


def results_of(name: str, function: Callable[..., Any], arguments: Any) -> tuple[np.ndarray, ...]:
    exercise, returned = PARTS[name], function(**arguments)
    returned = take_tokens(returned, arguments) if exercise.streams else returned
    return tuple(map(np.asarray, exercise.results(returned).values()))


def summarise(calls: list[FunctionCall]) -> list[float]:
    """A projection and the norm of all results; large numbers count by their logarithm."""
    with np.errstate(invalid="ignore"):  # a NaN of float16 may be a signalling one
        flat = np.concatenate([array.astype(np.float64).ravel() for call in calls for array in call.actual])
    flat = np.arcsinh(np.nan_to_num(flat, nan=3.0, posinf=1e9, neginf=-1e9))
    return [round(float(np.cos(np.arange(len(flat))) @ flat), 6), round(float(np.linalg.norm(flat)), 6)]


@pytest.fixture(scope="module")
def stored() -> Iterator[dict[str, list[float]]]:
    """Stored results by exercise and function; with WRITE_RESULTS, an empty dict, which is stored at the end."""
    if "WRITE_RESULTS" not in os.environ:
        yield json.loads(STORED.read_text())
        return
    rows: dict[str, list[float]] = {}
    yield rows
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items()))
    STORED.write_text(f"{{\n{lines}\n}}\n")


@pytest.mark.nightly_cases(but=["00w", "01", "01b", "04", "06", "12"])
@pytest.mark.parametrize("lesson", ON_NUMPY, ids=lambda lesson: lesson.number)
def test_every_mistake_of_beginners_is_seen_and_named_and_has_its_results(
    lesson: Lesson, stored: dict[str, list[float]]
):
    for name, wrong, calls in wrong_calls(lesson):
        assert any(call.is_clear for call in calls), wrong.__name__
        key, results = f"{name} {wrong.__name__}", summarise(calls)
        if "WRITE_RESULTS" in os.environ:
            stored[key] = results
        projection, norm = stored[key]
        assert results == pytest.approx([projection, norm], rel=0, abs=TOLERANCE * (1 + norm)), wrong.__name__
        if not PARTS[name].streams:
            causes = [cause.name for cause in find_causes(PARTS[name], calls, wrong)]
            assert causes == [wrong.__name__.replace("_", "-")]


def test_beginners_have_exercises_names_sentences_and_stored_results():
    for name, functions in BEGINNERS.items():
        assert name in LESSON_OF
        assert len({function.__name__ for function in functions}) == len(functions)
        assert all((function.__doc__ or "").strip().endswith(".") for function in functions)
    expected = {f"{name} {function.__name__}" for name, functions in BEGINNERS.items() for function in functions}
    assert set(json.loads(STORED.read_text())) == expected
