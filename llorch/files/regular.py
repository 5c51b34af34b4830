"""Opening a file that somebody else made: only a regular one, and without waiting for it.

Opening a named pipe waits for a writer, for ever if there is none; reading a device may never end.
"""

import os
import stat
from pathlib import Path

from llorch.errors import FormatError

# A pipe is then opened at once. Neither flag is known everywhere.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | Path) -> int:
    """Open a regular file, through links, for reading; FormatError Unsupported for a folder, a pipe or a device."""
    descriptor = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError("Unsupported", "expected a regular file, got something else", path=path)
    return descriptor


def read_regular(path: str | Path, *, limit: int) -> bytes:
    """Read a small regular file; FormatError as `open_regular`, or TooLarge beyond `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FormatError("TooLarge", f"the file has more than {limit} bytes", path=path)
    return data
