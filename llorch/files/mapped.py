"""A file opened once, mapped read-only, and watched for change while arrays look into it.

A map that reaches past the end of its file kills the whole process with SIGBUS on the first touch. So size
and modification time are compared with those at opening each time a tensor is taken, and the size each time
a weight that looks into the map is used: a file that was cut before is an error message. One that is cut
during a product, or under an array that a caller took and kept, still is SIGBUS: no Python code can catch
that. The command line then says where it was (faulthandler); who must be sure copies the array.

Source: POSIX mmap; reliability notes of the project (safetensors and numpy.memmap die here).
"""

import errno
import logging
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from llorch.files.foreign import HEAD, refuse_pointer
from llorch.runtime.errors import ErrorCode, FormatError
from llorch.runtime.memory import address_space_left

logger = logging.getLogger(__name__)

# A pipe is then opened at once. Neither flag is known everywhere.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_NO_FILES = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


@contextmanager
def on_error(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call a function, such as the `close` of what was opened, if the body fails."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


def open_regular(path: str | Path) -> int:
    """Open a file that somebody else made for reading, through links.

    FormatError Unsupported for what is no regular file, BadMagic for the pointer that git-lfs leaves in its place.
    Opening a named pipe waits for a writer, for ever if there is none; reading a device may never end.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind in _NO_FILES:  # nobody can open a socket
        raise _no_regular_file(path, kind)
    descriptor = os.open(path, _FLAGS)
    if not stat.S_ISREG(kind := os.fstat(descriptor).st_mode):  # it was replaced meanwhile
        os.close(descriptor)
        raise _no_regular_file(path, stat.S_IFMT(kind))
    with on_error(partial(os.close, descriptor)):
        refuse_pointer(os.read(descriptor, HEAD), path)
        os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _no_regular_file(path: str | Path, kind: int) -> FormatError:
    """Return the error for a path that is a folder, pipe or device; `kind` is the file type of its mode."""
    actual = _NO_FILES.get(kind, "something else")
    return FormatError("Unsupported", f"expected a regular file, got {actual}; write the data to a file", path=path)


def read_regular(path: str | Path, *, limit: int) -> bytes:
    """Read a small regular file; FormatError as `open_regular`, or TooLarge beyond `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FormatError("TooLarge", f"the file has more than {limit} bytes", path=path)
    return data


@lru_cache(maxsize=64)
def note_once(path: Path, message: str) -> None:
    """Warn of a file, which goes to stderr; once, however often a command opens the file."""
    logger.warning("note: %s: %s", path, message)


def release_pages(view: np.ndarray) -> None:
    """Let the system forget the pages of a mapped file that were read: they count as memory of this process."""
    owner: object = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    mapped = owner.obj if isinstance(owner, memoryview) else owner
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)


class MappedFile:
    """A read-only map of a regular file; views stay valid after `close`, new ones are refused."""

    def __init__(self, path: str | Path) -> None:
        """Open and map a regular file, through links; MemoryError where there is no address space (`ulimit -v`)."""
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
            message = f"{self.path}: mapping the file needs {self.size / 1e9:.2f} GB of address space"
            left = f"{address_space_left() / 1e9:.2f} GB are left"
            raise MemoryError(f"{message}, {left}; raise ulimit -v") from None

    def error(self, code: ErrorCode, message: str, offset: int | None = None) -> FormatError:
        """Build (not raise) the error that names this file."""
        return FormatError(code, message, path=self.path, offset=offset)

    def view(self, offset: int, n_bytes: int) -> np.ndarray:
        """Return a read-only view of a range inside `size`, which keeps the map alive; as `require_unchanged`."""
        self.require_unchanged()
        return self._bytes[offset : offset + n_bytes]

    def require_unchanged(self) -> None:
        """Refuse a file that was cut (Truncated), written to (Inconsistent) or closed (ValueError) since."""
        if not self.close.alive:
            raise ValueError(f"{self.path}: the file is closed; open it again to read more tensors")
        state = self._state_now()
        if state[0] < self.size:
            self.require_whole()
        if state != self._state:
            raise self.error("Inconsistent", "the file was changed while open; open it again")

    def require_whole(self) -> None:
        """Refuse (Truncated) to go on with arrays that look past the end of a file that was cut and is open."""
        size = self._state_now()[0] if self.close.alive else self.size
        if size < self.size:
            raise self.error("Truncated", f"the file was cut from {self.size} to {size} bytes while open")

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Facts that tell the file from another and from a changed one: device, inode, size, times of change."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _state_now(self) -> tuple[int, int]:
        """Return the size and modification time of the open file, to notice changes."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tensor table says of one tensor, whatever the format."""

    name: str
    shape: tuple[int, ...]  # slowest axis first
    offset: int  # bytes from the start of the file
    n_bytes: int


Info = TypeVar("Info", bound=Entry)
Opened = TypeVar("Opened", bound="TensorFile[Any]")  # Self would trip the checks that pytest puts in


class TensorFile(Generic[Info]):
    """Open files with one table of named tensors; a context manager that closes them."""

    stored: Mapping[str, Info]  # the tensors of the files
    tensors: Mapping[str, Info]  # what is read as a weight: the same, or matrices made of several

    def __init__(self, path: str | Path, *files: MappedFile) -> None:
        """Begin with the files that are open already; the tables are the subclass's business."""
        self.path = Path(path)
        self._files = [*files]
        self._file_of: dict[str, MappedFile] = {}  # of the tensors in other files than the first

    @property
    def fingerprint(self) -> list[tuple[int, ...]]:
        """See `MappedFile.fingerprint`; one for each file."""
        return [file.fingerprint for file in self._files]

    def entries_by_file(self) -> list[list[Info]]:
        """Return the tensors of each file of the model, in the order of their bytes."""
        entries: dict[MappedFile, list[Info]] = {file: [] for file in self._files}
        for info in sorted(self.stored.values(), key=lambda info: (info.offset, info.n_bytes)):
            entries[self._mapped(info.name)].append(info)
        return [*entries.values()]

    def file_of(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self._mapped(name).path

    def _mapped(self, name: str) -> MappedFile:
        return self._file_of.get(name, self._files[0])

    def info(self, name: str) -> Info:
        """Return a tensor's line of the table; FormatError Missing for an unknown name."""
        if name not in self.stored:
            message = f"no tensor {name!r} among the {len(self.stored)} tensors of this file"
            raise FormatError("Missing", message, path=self.path)
        return self.stored[name]

    def raw(self, name: str) -> np.ndarray:
        """Return a read-only uint8 view of a tensor; FormatError Missing, or Truncated or Inconsistent if changed."""
        info = self.info(name)
        return self._mapped(name).view(info.offset, info.n_bytes)

    def require_whole(self, name: str) -> None:
        """Refuse (Truncated) to go on with a tensor that was taken from a file which was cut since."""
        self.info(name)
        self._mapped(name).require_whole()

    def close(self) -> None:
        """Close all files; arrays that were handed out stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
