"""Solve a lesson by files: write the arguments of every call of its check, and read the answers back.

    calls.npz      manifest.json and arrays, `rope/0007/x`: argument x of call 7 of the exercise rope
    answers.npz    the result of each call, `rope/0007/y`, under the names that the manifest lists as "answers"

The manifest lists the calls in order. Each entry has the exercise, its arguments and the names of its answers. An
argument is the name of an array of the file (several calls may share it), a number, or null where the model has none.
An answer is judged as if a function had returned it.
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

_MAX_BYTES = 1 << 30  # bytes of an answers file


class RecordedCalls:
    """Calls of a lesson's check (in isolated mode), by exercise, recorded while llorch's reference passes it."""

    def __init__(self, lesson: Lesson) -> None:
        """Run the check on the reference functions; `digests` are of the arguments of each call."""
        from llorch.apps.learn.check import check

        self.lesson, self.digests = lesson, {exercise.name: [] for exercise in lesson.parts}
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[bytes, str] = {}  # digest of an array -> its name in the file
        self._calls: list[dict[str, Any]] = []
        check(
            lesson,
            Implementation("the reference", {exercise.name: self._recorder(exercise) for exercise in lesson.parts}),
        )

    def npz(self) -> bytes:
        """Return the content of `calls.npz`."""
        manifest = {"version": 1, "lesson": self.lesson.number, "calls": self._calls}
        return to_npz(self.arrays, json.dumps(manifest, indent=1))

    def _recorder(self, exercise: Exercise) -> Call:
        """Make a function that calls the reference of an exercise and records the arguments of every call."""

        def call(**arguments: object) -> Any:
            call_id = f"{exercise.name}/{len(self.digests[exercise.name]):04d}"
            self.digests[exercise.name].append(_digest_arguments(arguments))
            answers = {name: f"{call_id}/{name}" for name in exercise.returns}
            self._calls.append(
                {"part": exercise.name, "arguments": self._to_json(arguments, f"{call_id}/"), "answers": answers}
            )
            return exercise.reference(**arguments)

        return call

    def _to_json(self, arguments: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Store each array of the arguments, and replace it by its name; keep numbers and None."""
        by_name = {}
        for name, value in arguments.items():
            if isinstance(value, Mapping):
                by_name[name] = self._to_json(value, f"{prefix}{name}.")
            elif value is None or isinstance(value, int | float):
                by_name[name] = value
            else:
                array = np.array(value)
                by_name[name] = self._names.setdefault(_digest_arguments({"": array}), prefix + name)
                self.arrays.setdefault(by_name[name], array)
        return by_name


def write_calls(lesson: Lesson, path: Path) -> int:
    """Write the calls that an implementation in any language has to answer; return their number.

    Raises:
        UserError: An exercise of the lesson is a loop that calls the model, or takes torch tensors.
    """
    if any(exercise.in_python_only for exercise in lesson.parts):
        raise UserError(f"inputs: lesson {lesson.number} has an exercise with a loop or torch; write it in Python")
    calls = RecordedCalls(lesson)
    with new_file(path) as file:
        file.write_bytes(calls.npz())
    return sum(map(len, calls.digests.values()))


def answered(lesson: Lesson, path: Path) -> Implementation:
    """Read a file of answers as an implementation; exercises without an answer count as unwritten.

    Raises:
        FormatError: The file is no npz of arrays, or has a name that is no answer's.
    """
    content = read_regular(path, limit=_MAX_BYTES)
    try:
        arrays = from_npz(content, most=_MAX_BYTES)
    except ValueError as error:
        raise FormatError("Malformed", str(error), path=path) from None
    calls = RecordedCalls(lesson)
    answer_names = {
        f"{exercise.name}/{index:04d}/{name}"
        for exercise in lesson.parts
        for index in range(len(calls.digests[exercise.name]))
        for name in exercise.returns
    }
    if unknown := sorted(arrays.keys() - answer_names):
        example = min(answer_names)
        raise FormatError("Unexpected", f"expected names like {example}, got {unknown[0]}", path=path)
    exercises = [exercise for exercise in lesson.parts if any(name.startswith(f"{exercise.name}/") for name in arrays)]
    return Implementation(str(path), {e.name: _make_lookup(e, calls.digests[e.name], arrays) for e in exercises})


def _make_lookup(exercise: Exercise, digests: list[bytes], arrays: Mapping[str, np.ndarray]) -> Call:
    """Make a function that returns the answer for its arguments.

    For other arguments than those recorded it returns the next answer: a wrong answer changes arguments of later calls.
    """
    first_index = {digest: index for index, digest in reversed(list(enumerate(digests)))}
    next_index = 0

    def call(**arguments: object) -> Any:
        nonlocal next_index
        digest = _digest_arguments(arguments)
        index = next_index % len(digests)
        if digests[index] != digest:
            index = first_index.get(digest, index)
        next_index = index + 1
        names = [f"{exercise.name}/{index:04d}/{name}" for name in exercise.returns]
        if missing := [name for name in names if name not in arrays]:
            raise LearnerFault(exercise.name, f"expected the answer {missing[0]} in the file, got none")
        values = [arrays[name] for name in names]
        return values if len(values) > 1 else values[0]

    return call


def _digest_arguments(arguments: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for name, array in flat(arguments).items():
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
