"""A learner's implementation, and which one a command or pytest means.

An exercise that is not written is taken from the reference. An implementation is a folder of Python files
(`l01_rms_norm.py` ...), or a program in any language (`cmd:./my-llama`) that is called with the name of an exercise,
reads its arguments from stdin as npz and writes its results to stdout as npz.
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
from llorch.apps.learn.folder import read_folder, renamed_in
from llorch.apps.learn.guard import guarded
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS, PARTS
from llorch.apps.learn.program import PREFIX, Program
from llorch.diagnosis.mistakes.planting import replaced
from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError, UserError


class Implementation:
    """Functions of a learner by the name of the part.

    Attributes:
        source: Names it in messages.
        written: What there is.
        renamed: What seems to be a part that is not written, under another name: a sentence by part.
        notes: What calls showed that is harmless but worth knowing, once each.
    """

    def __init__(self, source: str, written: Mapping[str, Call], renamed: Mapping[str, str] | None = None) -> None:
        """Hold the functions that a learner wrote, by name."""
        self.source, self.written, self.renamed = source, written, renamed or {}
        self.notes: dict[str, None] = {}

    def unwritten(self, parts: Iterable[Exercise]) -> list[str]:
        """Name the parts that are not written."""
        return [exercise.name for exercise in parts if exercise.name not in self.written]

    @contextmanager
    def installed(self, parts: Iterable[Exercise] | None = None, *, live: bool = False) -> Iterator[None]:
        """Run llorch with these parts (default: all) in place of its own functions, as far as they are written.

        The whole process has them meanwhile: nothing else may compute. In a `live` run nothing is judged, see `guard`.

        Raises:
            LearnerFault: Inside, where a part raises or returns what nothing can go on with.
        """
        with ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))  # numbers that are none are told by the verdict
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # torch, of arguments
            for exercise in PARTS.values() if parts is None else parts:
                if exercise.name in self.written:
                    call = guarded(exercise, self.written[exercise.name], note=self._note, live=live)
                    for place, adapt in exercise.places.items():
                        stack.enter_context(replaced(place, partial(adapt, call)))
            yield

    def _note(self, line: str) -> None:
        self.notes[line] = None


VARIABLE = "LLORCH_IMPL"
_MAX_FILE = 1 << 20  # bytes of a pyproject.toml


def chosen(option: str | None = None) -> str | None:
    """Find the chosen implementation, a folder or `cmd:` and a program; None where nothing was chosen.

    The strongest source comes first: the option of a command, LLORCH_IMPL, `impl` below [tool.llorch] in a
    pyproject.toml.

    Raises:
        FormatError: The pyproject.toml, the nearest one here or above, cannot be read.
    """
    return option or os.environ.get(VARIABLE) or _of_project(Path.cwd())


def _of_project(here: Path) -> str | None:
    """Return the implementation that the nearest pyproject.toml names; None if it names none."""
    file = next(
        (folder / "pyproject.toml" for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), None
    )
    if file is None:
        return None
    data = read_regular(file, limit=_MAX_FILE)
    try:
        table = tomllib.loads(data.decode()).get("tool", {}).get("llorch", {})
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
    """Open a folder, or `cmd:` and a program; `around` is put around every function and every import of a folder.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is no folder, or one without a file of a lesson.
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
    return Implementation(spec, written, renamed_in(folder, written))
