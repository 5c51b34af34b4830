"""A file opened once, mapped read-only, and watched for change while arrays look into it.

A map that reaches past the end of its file kills the whole process with SIGBUS on the first touch. So size
and modification time are compared with those at opening each time a tensor is taken, and the size each time
a weight that looks into the map is used: a file that was cut before is an error message. One that is cut
during a product, or under an array that a caller took and kept, still is SIGBUS: no Python code can catch
that. The command line then says where it was (faulthandler); who must be sure copies the array.

Source: POSIX mmap; reliability notes of the project (safetensors and numpy.memmap die here).
"""

import errno
import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from llorch.errors import ErrorCode, FormatError
from llorch.files.regular import open_regular
from llorch.memory import address_space_left


class MappedFile:
    """A read-only map of a regular file; views stay valid after `close`, new ones are refused."""

    def __init__(self, path: str | Path) -> None:
        """Open and map the file; nothing is read yet.

        Args:
            path: A regular file (symbolic links are followed).

        Raises:
            FileNotFoundError: Nothing has this path.
            FormatError: The path is a folder, a pipe or a device.
            MemoryError: There is no address space for the map (`ulimit -v`).
        """
        self.path = Path(path)
        descriptor = open_regular(self.path)
        # The finaliser closes the descriptor also when nobody calls close(); it must not hold `self`.
        self.close = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._state = self._state_now()
        self.size = self._state[0]
        self.map: mmap.mmap | bytes = self._mapped() if self.size else b""
        self._bytes = np.frombuffer(self.map, np.uint8)

    def _mapped(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(
                f"{self.path}: mapping it needs {self.size / 1e9:.2f} GB of address space, "
                f"{address_space_left() / 1e9:.2f} GB are left; raise ulimit -v"
            ) from None

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
        self.require_whole()
        if self._state_now() != self._state:
            raise self.error("Inconsistent", "the file was changed while open; open it again")

    def require_whole(self) -> None:
        """Refuse to go on with arrays that look past the end of a file that was cut.

        Raises:
            FormatError: Truncated. A closed file is no longer watched.
        """
        size = self._state_now()[0] if self.close.alive else self.size
        if size < self.size:
            raise self.error("Truncated", f"the file was cut from {self.size} to {size} bytes while open")

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """What tells the file from another and from itself after a change: device, inode, size, times of change."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _state_now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


@runtime_checkable
class Entry(Protocol):
    """What a tensor table says of one tensor, whatever the format."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the file."""
        ...

    @property
    def n_bytes(self) -> int:
        """Length in the file."""
        ...


Info = TypeVar("Info", bound=Entry)
Opened = TypeVar("Opened", bound="TensorFile[Any]")  # Self would trip the checks that pytest puts in


class TensorFile(Generic[Info]):
    """An open file with a table of named tensors; a context manager that closes it."""

    tensors: Mapping[str, Info]

    def __init__(self, path: str | Path) -> None:
        """Open and map the file; the table is the subclass's business.

        Args:
            path: A regular file.
        """
        self._file = MappedFile(path)
        self.path = self._file.path

    @property
    def fingerprint(self) -> list[tuple[int, ...]]:
        """See `MappedFile.fingerprint`; one for each file."""
        return [self._file.fingerprint]

    def info(self, name: str) -> Info:
        """Look up a tensor.

        Args:
            name: Name in the file.

        Returns:
            Its line of the table.

        Raises:
            FormatError: Missing for an unknown name.
        """
        if name not in self.tensors:
            raise self._file.error("Missing", f"no tensor {name!r} among the {len(self.tensors)} of this file")
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """Look at the bytes of a tensor.

        Args:
            name: Name in the file.

        Returns:
            A read-only uint8 view of the map.

        Raises:
            FormatError: Missing for an unknown name; Truncated or Inconsistent if the file changed.
        """
        info = self.info(name)
        return self._file.view(info.offset, info.n_bytes)

    def require_whole(self, name: str) -> None:
        """Refuse to go on with a tensor that was taken from a file which was cut since.

        Args:
            name: Name in the file.

        Raises:
            FormatError: Missing for an unknown name; Truncated.
        """
        self.info(name)
        self._file.require_whole()

    def close(self) -> None:
        """Close the file; arrays that were handed out stay valid."""
        self._file.close()

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
