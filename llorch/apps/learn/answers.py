"""Dump files as the hand-in: every call of a lesson's check in one file, and an implementation that reads the answers.

    calls.npz      manifest.json and arrays, `rope/0007/x`: argument x of call 7 of the part rope
    answers.npz    what was computed for each, `rope/0007/y`, by the names that the manifest gives under "answers"

The manifest lists the calls in their order: the part, its arguments (names of arrays of the file, which several calls
may share; numbers as they are; null for what the model has not) and the names that answers have. What is wrong in an
answer is judged as if a function had returned it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.lessons import Lesson
from llorch.apps.learn.program import flat, from_npz, to_npz
from llorch.files.mapped import read_regular
from llorch.files.new_file import new_file
from llorch.runtime.errors import FormatError, LearnerFault, UserError

_MOST = 1 << 30  # bytes of an answer


class RecordedCalls:
    """The calls of a lesson's isolated check, by part, recorded while the reference passes it."""

    def __init__(self, lesson: Lesson) -> None:
        """Run the check."""
        from llorch.apps.learn.check import check

        self.lesson, self.of_part = lesson, {exercise.name: [] for exercise in lesson.parts}
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[bytes, str] = {}
        self._listed: list[dict[str, Any]] = []
        check(
            lesson,
            Implementation("the reference", {exercise.name: self._recording(exercise) for exercise in lesson.parts}),
        )

    def npz(self) -> bytes:
        """Write the file as bytes."""
        about = {"version": 1, "lesson": self.lesson.number, "calls": self._listed}
        return to_npz(self.arrays, json.dumps(about, indent=1))

    def _recording(self, exercise: Exercise) -> Call:
        """Return the reference of an exercise, which also records the arguments of every call."""

        def call(**given: object) -> Any:
            name = f"{exercise.name}/{len(self.of_part[exercise.name]):04d}"
            self.of_part[exercise.name].append(_digest_of_inputs(given))
            answers = {each: f"{name}/{each}" for each in exercise.returns}
            self._listed.append(
                {"part": exercise.name, "arguments": self._inputs_as_json(given, f"{name}/"), "answers": answers}
            )
            return exercise.reference(**given)

        return call

    def _inputs_as_json(self, given: Mapping[str, Any], above: str) -> dict[str, Any]:
        """Store each array of a call's inputs, and put its name in its place; numbers and None stay."""
        said = {}
        for name, value in given.items():
            if isinstance(value, Mapping):
                said[name] = self._inputs_as_json(value, f"{above}{name}.")
            elif value is None or isinstance(value, int | float):
                said[name] = value
            else:
                array = np.array(value)
                said[name] = self._names.setdefault(_digest_of_inputs({"": array}), above + name)
                self.arrays.setdefault(said[name], array)
        return said


def write_calls(lesson: Lesson, path: Path) -> int:
    """Write what an implementation in any language has to answer; return the number of calls.

    Raises:
        ValueError: A part of the lesson is a loop that calls others, or is given torch tensors.
    """
    if any(exercise.in_python_only for exercise in lesson.parts):
        raise UserError(f"inputs: lesson {lesson.number} has an exercise with a loop or torch; write it in Python")
    calls = RecordedCalls(lesson)
    with new_file(path) as file:
        file.write_bytes(calls.npz())
    return sum(map(len, calls.of_part.values()))


def answered(lesson: Lesson, path: Path) -> Implementation:
    """Take a file of answers for an implementation; parts without an answer are not written.

    Raises:
        FormatError: The file is none of arrays, or has a name that no answer has.
    """
    data = read_regular(path, limit=_MOST)
    try:
        arrays = from_npz(data, most=_MOST)
    except ValueError as error:
        raise FormatError("Malformed", str(error), path=path) from None
    calls = RecordedCalls(lesson)
    wanted = {
        f"{exercise.name}/{n:04d}/{name}"
        for exercise in lesson.parts
        for n in range(len(calls.of_part[exercise.name]))
        for name in exercise.returns
    }
    if unknown := sorted(arrays.keys() - wanted):
        example = min(wanted)
        raise FormatError("Unexpected", f"expected names like {example}, got {unknown[0]}", path=path)
    parts = [exercise for exercise in lesson.parts if any(name.startswith(f"{exercise.name}/") for name in arrays)]
    return Implementation(
        str(path), {exercise.name: _looking_up(exercise, calls.of_part[exercise.name], arrays) for exercise in parts}
    )


def _looking_up(exercise: Exercise, digests: list[bytes], arrays: Mapping[str, np.ndarray]) -> Call:
    """Make a function that returns the recorded answer for the given arguments.

    If no call had them, it returns the answer after the last one, because later calls may follow from it.
    """
    first = {digest: n for n, digest in reversed(list(enumerate(digests)))}
    next_one = 0

    def call(**given: object) -> Any:
        nonlocal next_one
        digest = _digest_of_inputs(given)
        n = next_one % len(digests)
        if digests[n] != digest:
            n = first.get(digest, n)
        next_one = n + 1
        names = [f"{exercise.name}/{n:04d}/{each}" for each in exercise.returns]
        if missing := [name for name in names if name not in arrays]:
            raise LearnerFault(exercise.name, f"expected the answer {missing[0]} in the file, got none")
        values = [arrays[name] for name in names]
        return values if len(values) > 1 else values[0]

    return call


def _digest_of_inputs(given: Mapping[str, Any]) -> bytes:
    made = hashlib.sha256()
    for name, array in flat(given).items():
        made.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.digest()
