"""A file opened once, mapped read-only, and watched for change while arrays look into it.

A map that reaches past the end of its file kills the whole process with SIGBUS on the first touch. So size
and modification time are compared with those at opening each time a tensor is taken: a file that was cut or
overwritten in the meantime is an error message, not a dead process.

Source: POSIX mmap; reliability notes of the project (safetensors and numpy.memmap die here).
"""

import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from llorch.errors import ErrorCode, FormatError


class MappedFile:
    """A read-only map of a regular file; views stay valid after `close`, new ones are refused."""

    def __init__(self, path: str | Path) -> None:
        """Open and map the file; nothing is read yet.

        Args:
            path: A regular file (symbolic links are followed).

        Raises:
            FileNotFoundError: Nothing has this path.
            FormatError: The path is a folder, a pipe or a device.
        """
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise FormatError("Unsupported", "expected a regular file, got something else", path=path)
        descriptor = os.open(self.path, os.O_RDONLY)
        # The finaliser closes the descriptor also when nobody calls close(); it must not hold `self`.
        self.close = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._state = self._state_now()
        self.size = self._state[0]
        self.map: mmap.mmap | bytes = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if self.size else b""
        self._bytes = np.frombuffer(self.map, np.uint8)

    def error(self, code: ErrorCode, message: str, offset: int | None = None) -> FormatError:
        """Build (not raise) the error that names this file.

        Args:
            code: The class of fault.
            message: What was expected and what was got.
            offset: Where in the file, in bytes.

        Returns:
            The exception to raise.
        """
        return FormatError(code, message, path=self.path, offset=offset)

    def view(self, offset: int, n_bytes: int) -> np.ndarray:
        """Look at a range of the file without copying it.

        Args:
            offset: First byte.
            n_bytes: Length of the range; the whole range was checked against `size` by the caller.

        Returns:
            A read-only uint8 array that keeps the map alive.

        Raises:
            FormatError: The file changed since it was opened.
            ValueError: The file was closed.
        """
        self.require_unchanged()
        return self._bytes[offset : offset + n_bytes]

    def require_unchanged(self) -> None:
        """Refuse to look into a file that is no longer the one that was checked.

        Raises:
            FormatError: The file was cut (Truncated) or written to (Inconsistent) since it was opened.
            ValueError: The file was closed.
        """
        if not self.close.alive:
            raise ValueError(f"{self.path}: the file is closed; open it again to read more tensors")
        size, modified = self._state_now()
        if size < self.size:
            raise self.error("Truncated", f"the file was cut from {self.size} to {size} bytes while open")
        if (size, modified) != self._state:
            raise self.error("Inconsistent", "the file was changed while open; open it again")

    def _state_now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns
