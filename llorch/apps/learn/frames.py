"""Traceback of an error in a learner's code: the lines of that code, without those of llorch and of libraries."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGES = ("site-packages", "dist-packages")  # of an environment may lie in another one, which it sees
_OF_OTHERS = (
    Path(__file__).parents[2],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    *(Path(place) for place in sys.path if Path(place).name in _PACKAGES),
)
_SHOWN = 6  # frames; of a recursion without end there are a thousand


def own_frames(error: BaseException) -> list[str]:
    """List file, line and text of every frame in the learner's code, the outermost first."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 0, "", line=error.text or ""))
    lines = [f"{_near(frame.filename)}:{frame.lineno}  {frame.line or ''}".rstrip() for frame in frames]
    if len(lines) > _SHOWN:
        half = _SHOWN // 2
        lines[half:-half] = [f"({len(lines) - _SHOWN} more)"]
    return lines


def all_frames(error: BaseException) -> str:
    """Format the traceback as Python prints it, with causes."""
    return "".join(traceback.format_exception(error)).rstrip()


def is_own(file: str) -> bool:
    """Tell if a file belongs neither to llorch nor to a library."""
    return not file.startswith("<") and not any(Path(file).is_relative_to(place) for place in _OF_OTHERS)


def _near(file: str) -> str:
    """Relative to where the command runs, if it lies below."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
