"""A learner's implementation, and the choice of the implementation that a command or pytest runs.

An implementation is a folder of Python files (`l01_rms_norm.py` ...), or a program in any language (`cmd:./my-llama`).
llorch calls a program with the name of an exercise; it reads the arguments from stdin and writes the results to stdout,
both as npz. llorch's reference runs in place of exercises that are not written.
"""

import os
import shlex
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.folder import find_renamed, read_folder
from llorch.apps.learn.function_calls import CallRecord
from llorch.apps.learn.guard import guard_function
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, PARTS
from llorch.apps.learn.program import PREFIX, Program
from llorch.diagnosis.mistakes.planting import replaced
from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError, UserError


class Implementation:
    """A learner's functions, by the name of the exercise.

    Attributes:
        source: Name of the implementation in messages.
        written: The functions that the learner has written.
        renamed: By unwritten exercise, a sentence about a function that seems to be it under another name.
        notes: Harmless observations of calls that the learner should know, each one once.
        calls: Calls of the functions in checks.
    """

    def __init__(self, source: str, written: Mapping[str, Call], renamed: Mapping[str, str] | None = None) -> None:
        """Hold the functions that a learner wrote, by exercise name."""
        self.source, self.written, self.renamed = source, written, renamed or {}
        self.notes: dict[str, None] = {}
        self.calls = CallRecord()

    def unwritten(self, exercises: Iterable[Exercise]) -> list[str]:
        """List the names of the exercises that are not written."""
        return [exercise.name for exercise in exercises if exercise.name not in self.written]

    @contextmanager
    def installed(self, exercises: Iterable[Exercise] | None = None, *, live: bool = False) -> Iterator[None]:
        """Run llorch with the written functions of these exercises (default: all) in place of its own functions.

        The replacement holds for the whole process, so no other thread may compute. A `live` run generates for a user
        and is compared with no golden, see `guard`.

        Raises:
            LearnerFault: In the `with` block, if a learner's function raises or returns an unusable value.
        """
        with ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))  # no warnings: the report of the check has NaN and infinity
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # torch, of arguments
            for exercise in PARTS.values() if exercises is None else exercises:
                if exercise.name in self.written:
                    call = guard_function(
                        exercise, self.written[exercise.name], note=self._note, record=self.calls, live=live
                    )
                    for replaced_name, adapt in exercise.places.items():
                        stack.enter_context(replaced(replaced_name, partial(adapt, call)))
            yield

    def _note(self, line: str) -> None:
        self.notes[line] = None


VARIABLE = "LLORCH_IMPL"  # of the environment
_MAX_FILE_BYTES = 1 << 20  # of a pyproject.toml


def chosen(option: str | None = None) -> str | None:
    """Return the chosen implementation, a folder or `cmd:` and a program; None if nothing chooses one.

    The first source decides: `option`, LLORCH_IMPL, `impl` in [tool.llorch] of the pyproject.toml here or next above.

    Raises:
        FormatError: The pyproject.toml cannot be read.
    """
    return option or os.environ.get(VARIABLE) or _read_project_choice(Path.cwd())


def _read_project_choice(start: Path) -> str | None:
    """Return the implementation that the nearest pyproject.toml names, relative to its folder; None without one."""
    file = next(
        (folder / "pyproject.toml" for folder in (start, *start.parents) if (folder / "pyproject.toml").is_file()), None
    )
    if file is None:
        return None
    content = read_regular(file, limit=_MAX_FILE_BYTES)
    try:
        table = tomllib.loads(content.decode()).get("tool", {}).get("llorch", {})
    except (ValueError, AttributeError) as error:
        raise FormatError("Malformed", f"[tool.llorch]: expected a TOML table: {error}", path=file) from None
    impl = table.get("impl") if isinstance(table, dict) else table
    if impl is None or not impl:
        return None
    if not isinstance(impl, str):
        raise FormatError("Malformed", f"[tool.llorch] impl: expected a string, got {impl!r:.80}", path=file)
    if not impl.startswith(PREFIX):
        return str(file.parent / impl)
    program = impl.removeprefix(PREFIX)
    return f"{PREFIX}{shlex.quote(str(file.parent))}/{program}" if program.startswith(".") else impl


def opened(spec: str, around: Callable[[Call], Call] = lambda call: call) -> Implementation:
    """Open a folder, or `cmd:` and a program; `around` wraps every function and every import of a folder.

    Raises:
        FileNotFoundError: The folder or program does not exist.
        UserError: The path is a file, or a folder without a lesson's file.
    """
    if spec.startswith(PREFIX):
        return Implementation(spec, Program(spec))
    folder = Path(spec)
    make = f"make one with: llorch learn init {spec}"
    if not folder.exists():
        raise FileNotFoundError(f"implementation: expected a folder or {PREFIX}PROGRAM, there is no {spec!r}; {make}")
    if not folder.is_dir():
        raise UserError(f"implementation: expected a folder, got the file {spec!r}; write {PREFIX}{spec} for a program")
    if not any((folder / f"{lesson.module}.py").is_file() for lesson in LESSONS):
        raise UserError(
            f"implementation: expected a lesson's file such as {BY_NUMBER['01'].module}.py in {spec!r}; {make}"
        )
    written = read_folder(folder, around)
    return Implementation(spec, written, find_renamed(folder, written))
