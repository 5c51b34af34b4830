"""Which implementation is meant, and opening it: the one way for every command, and for pytest."""

import os
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

from llorch.apps.learn.exercise import Call
from llorch.apps.learn.folder import read_folder, renamed_in
from llorch.apps.learn.implementation import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS
from llorch.apps.learn.program import PREFIX, Program
from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError, UserError

VARIABLE = "LLORCH_IMPL"
_MAX_FILE = 1 << 20  # bytes of a pyproject.toml


def chosen(option: str | None = None) -> str | None:
    """Find the chosen implementation, the strongest source first.

    The sources are an option, LLORCH_IMPL, and `impl` below [tool.llorch] in a pyproject.toml.

    Args:
        option: Option of the command, if it was given.

    Returns:
        A folder, or `cmd:` and a program; None where nothing was chosen.

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
    """Open what was chosen.

    Args:
        spec: A folder, or `cmd:` and a program.
        around: Put around every Python function of a folder, and around the import of each file.

    Returns:
        The implementation.

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
