"""`cmd:` programs: an implementation in any language, started once for every call.

    PROGRAM [ARGUMENTS] PART     arguments of the part as an npz on stdin, results as an npz on stdout

Names are those of the part's parameters and results; a dict of arrays is flat (`w.q_proj`), numbers are arrays without
axes, what is None is left out. Exit status 69 says that the part is not written; a program is first asked with nothing
on stdin. What it writes to stderr is passed on. A part that is given the model as a function is never one of its.
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
    """Write an npz file as bytes, equal for equal arrays. A manifest, if given, is stored with the arrays."""
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
    """Read the arrays of an npz file by name, without `.npy`; together they may have `most` bytes.

    Raises:
        ValueError: The file is no npz, is cut or is too large; it has members other than arrays, arrays of
            objects, or a name twice.
    """
    found: dict[str, np.ndarray] = {}
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            members = [info for info in archive.infolist() if info.filename != MANIFEST]
            if (size := sum(info.file_size for info in members)) > most:
                raise UserError(f"expected at most {most} bytes, got {size}")
            for info in members:
                name = info.filename.removesuffix(".npy")
                if name in found:
                    raise UserError(f"expected each name once, got {name} twice")
                found[name] = np.lib.format.read_array(io.BytesIO(archive.read(info)), allow_pickle=False)
    except Exception as error:  # zipfile and numpy raise a dozen classes for broken bytes
        raise UserError(f"not an npz of arrays: {error}") from None
    return found


PREFIX = "cmd:"
UNWRITTEN = 69  # the exit status; EX_UNAVAILABLE of sysexits.h
SECONDS = 10.0  # that one call may take
_MOST = 256 << 20  # bytes of an answer


class Program(Mapping[str, Call]):
    """What a program has written, by the name of the part; asked when it is wanted."""

    def __init__(self, spec: str, *, seconds: float = SECONDS) -> None:
        """Find the program of `cmd:PROGRAM ARGUMENTS`; FileNotFoundError without one, UserError for an open quote."""
        try:
            words = shlex.split(spec.removeprefix(PREFIX))
        except ValueError as error:
            raise UserError(f"implementation: expected {PREFIX} and a command line, got {spec!r} ({error})") from None
        found = shutil.which(words[0]) if words else None
        if found is None:
            what = repr(words[0]) if words else "nothing"
            raise FileNotFoundError(f"implementation: expected {PREFIX} and an executable program, got {what}")
        self._words, self._seconds = [os.path.abspath(found), *words[1:]], seconds
        self._is_written: dict[str, bool] = {}

    def __getitem__(self, name: str) -> Call:
        """Return the function of that name; KeyError if it is not written."""
        if name not in self._is_written:
            self._is_written[name] = name in PARTS and not PARTS[name].in_python_only and self._asked(name)
        if not self._is_written[name]:
            raise KeyError(name)
        return self._function(PARTS[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the parts that the program has."""
        return (name for name in PARTS if name in self)

    def __len__(self) -> int:
        """Return the number of functions that the program may be asked for."""
        return sum(1 for _ in self)

    def _asked(self, name: str) -> bool:
        """Ask the program if it has a part: a crash because of missing arguments means yes."""
        try:
            ended = run([*self._words, name], seconds=self._seconds, output=DEVNULL, errors=DEVNULL)
        except OSError:
            return True  # the call will tell
        return ended.status != UNWRITTEN

    def _function(self, exercise: Exercise) -> Call:
        def call(**given: object) -> Any:
            status, data = self._run(exercise.name, to_npz(flat(given)))
            if status != 0:
                raise LearnerFault(exercise.name, f"the program {_ended(status)}")
            try:
                results = from_npz(data, most=_MOST)
            except ValueError as error:
                raise LearnerFault(exercise.name, f"the program's stdout is {error}") from None
            if results.keys() != set(exercise.returns):
                actual = ", ".join(results) or "none"
                message = f"expected the program to write arrays named {', '.join(exercise.returns)}, got {actual:.200}"
                raise LearnerFault(exercise.name, message)
            values = [results[name] for name in exercise.returns]
            return values if len(values) > 1 else values[0]

        return call

    def _run(self, name: str, data: bytes) -> tuple[int, bytes]:
        """Ask the program for one function; return its exit status and stdout."""
        try:
            ended = run([*self._words, name], seconds=self._seconds, stdin=data, errors=None, most=_MOST)
        except OSError as error:
            raise LearnerFault(name, f"{self._words[0]} cannot be started: {error.strerror}") from None
        if ended.limit == "time":
            raise LearnerFault(name, f"the program took over {self._seconds:g} s; check that each loop ends")
        if ended.limit == "output":
            raise LearnerFault(name, f"expected at most {_MOST >> 20} MiB on stdout, got more")
        if ended.limit == "exit":
            raise LearnerFault(name, "the program closed stdout and did not end")
        return ended.status, ended.output


def flat(given: Mapping[str, Any], above: str = "") -> dict[str, np.ndarray]:
    """Flatten arguments to arrays: those of a dict as `dict.name`, without values of None."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            arrays |= flat(value, f"{above}{name}.")
        elif value is not None:
            arrays[above + name] = np.asarray(value)
    return arrays


def _ended(status: int) -> str:
    if status == UNWRITTEN:
        return f"ended with {UNWRITTEN} (not written) after it read its arguments; end with {UNWRITTEN} before that"
    if status < 0:
        return f"was ended by {signal_name(status)}"
    return f"ended with exit status {status}"
