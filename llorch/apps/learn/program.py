"""`cmd:` programs: an implementation in any language, started once for every call.

    PROGRAM [ARGUMENTS] EXERCISE     reads the arguments from stdin as an npz, writes the results to stdout as an npz

The npz names are those of the exercise's parameters and results. A dict of arrays is flat (`w.q_proj`), a number is an
array without axes, and None is omitted. Exit status 69 means that the exercise is not written; llorch finds this out by
a first run with empty stdin. stderr is passed on. Programs cannot solve exercises that take the model as a function.
"""

import io
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.lessons import PARTS
from llorch.runtime.errors import LearnerFault, UserError
from llorch.runtime.worker import DEVNULL, run, signal_name

MANIFEST = "manifest.json"


def to_npz(arrays: Mapping[str, np.ndarray], manifest: str | None = None) -> bytes:
    """Encode arrays and an optional JSON manifest as an npz file; equal arrays give equal bytes."""
    file = io.BytesIO()
    with ZipFile(file, "w", ZIP_STORED) as archive:
        if manifest is not None:
            archive.writestr(ZipInfo(MANIFEST), manifest)
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(ZipInfo(f"{name}.npy"), member.getvalue())
    return file.getvalue()


def from_npz(data: bytes, *, most: int) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file by name, without `.npy`; `most` is the maximum of their total bytes.

    Raises:
        UserError: No npz, truncated or too large; members other than arrays of numbers, or a name twice.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            members = [member for member in archive.infolist() if member.filename != MANIFEST]
            if (size := sum(member.file_size for member in members)) > most:
                raise UserError(f"expected at most {most} bytes, got {size}")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise UserError(f"expected each name once, got {name} twice")
                arrays[name] = np.lib.format.read_array(io.BytesIO(archive.read(member)), allow_pickle=False)
    except Exception as error:  # zipfile and numpy raise a dozen classes for broken bytes
        raise UserError(f"not an npz of arrays: {error}") from None
    return arrays


PREFIX = "cmd:"
UNWRITTEN = 69  # exit status; EX_UNAVAILABLE of sysexits.h
SECONDS = 10.0  # time limit of one call
_MAX_BYTES = 256 << 20  # bytes of the results of one call


class Program(Mapping[str, Call]):
    """Functions of a program by exercise name; the first lookup of a name asks the program if it is written."""

    def __init__(self, spec: str, *, seconds: float = SECONDS) -> None:
        """Find the program of `cmd:PROGRAM ARGUMENTS`; FileNotFoundError without one, UserError for bad quotes."""
        try:
            command = shlex.split(spec.removeprefix(PREFIX))
        except ValueError as error:
            raise UserError(f"implementation: expected {PREFIX} and a command line, got {spec!r} ({error})") from None
        executable = shutil.which(command[0]) if command else None
        if executable is None:
            shown_word = repr(command[0]) if command else "nothing"
            raise FileNotFoundError(f"implementation: expected {PREFIX} and an executable program, got {shown_word}")
        self._command, self._seconds = [os.path.abspath(executable), *command[1:]], seconds
        self._is_written: dict[str, bool] = {}

    def __getitem__(self, name: str) -> Call:
        """Return the function of an exercise; raise KeyError if it is not written."""
        if name not in self._is_written:
            self._is_written[name] = name in PARTS and not PARTS[name].in_python_only and self._ask_written(name)
        if not self._is_written[name]:
            raise KeyError(name)
        return self._function(PARTS[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the exercises that are written in the program."""
        return (name for name in PARTS if name in self)

    def __len__(self) -> int:
        """Return the number of written exercises."""
        return sum(1 for _ in self)

    def _ask_written(self, name: str) -> bool:
        """Ask the program if it has an exercise: a crash because of missing arguments means yes."""
        try:
            process = run([*self._command, name], seconds=self._seconds, output=DEVNULL, errors=DEVNULL)
        except OSError:
            return True  # the call reports the error
        return process.status != UNWRITTEN

    def _function(self, exercise: Exercise) -> Call:
        def call(**arguments: object) -> Any:
            status, output = self._run(exercise.name, to_npz(flat(arguments)))
            if status != 0:
                raise LearnerFault(exercise.name, f"the program {_describe_exit(status)}")
            try:
                results = from_npz(output, most=_MAX_BYTES)
            except ValueError as error:
                raise LearnerFault(exercise.name, f"the program's stdout is {error}") from None
            if results.keys() != set(exercise.returns):
                actual = ", ".join(results) or "none"
                message = f"expected the program to write arrays named {', '.join(exercise.returns)}, got {actual:.200}"
                raise LearnerFault(exercise.name, message)
            arrays = [results[name] for name in exercise.returns]
            return arrays if len(arrays) > 1 else arrays[0]

        return call

    def _run(self, name: str, stdin: bytes) -> tuple[int, bytes]:
        """Run one exercise with its arguments on stdin; return the exit status and stdout."""
        try:
            process = run([*self._command, name], seconds=self._seconds, stdin=stdin, errors=None, most=_MAX_BYTES)
        except OSError as error:
            raise LearnerFault(name, f"{self._command[0]} cannot be started: {error.strerror}") from None
        if process.limit == "time":
            raise LearnerFault(name, f"the program took over {self._seconds:g} s; check that each loop ends")
        if process.limit == "output":
            raise LearnerFault(name, f"expected at most {_MAX_BYTES >> 20} MiB on stdout, got more")
        if process.limit == "exit":
            raise LearnerFault(name, "the program closed stdout and did not end")
        return process.status, process.output


def flat(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Flatten arguments to arrays: the arrays of a dict become `dict.name`, None is omitted."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            arrays |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            arrays[prefix + name] = np.asarray(value)
    return arrays


def _describe_exit(status: int) -> str:
    if status == UNWRITTEN:
        return f"ended with {UNWRITTEN} (not written) after it read its arguments; end with {UNWRITTEN} before that"
    if status < 0:
        return f"was ended by {signal_name(status)}"
    return f"ended with exit status {status}"
