"""Read-only memory map of a file, checked for changes while arrays are views of it.

If the file is truncated, access to the map after its end kills the process with SIGBUS. Therefore size and
modification time are compared with those at opening each time a tensor is read, and the size each time a weight that is
a view of the map is used: a truncated file raises an error. A truncation during a product, or under an array that a
caller holds, still causes SIGBUS, which Python cannot catch. The command line then prints the traceback (faulthandler).
A caller that must be safe copies the array.

Source: POSIX mmap. safetensors and numpy.memmap, tried here, do not survive a truncation.
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

# O_NONBLOCK: opening a named pipe must not wait for a writer. Windows lacks O_NONBLOCK, POSIX lacks O_BINARY.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_REFUSED_KINDS = {  # types of files, with their names in the error
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


@contextmanager
def on_error(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call a function, such as `close` of an open file, if the body fails."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


def open_regular(path: str | Path) -> int:
    """Open an untrusted file for reading; follows links.

    FormatError Unsupported if it is no regular file, BadMagic for a git-lfs pointer. Opening a named pipe without a
    writer would block forever; reading a device may never end.
    """
    if stat.S_IFMT(mode := os.stat(path).st_mode) in _REFUSED_KINDS:  # before opening: a socket cannot be opened
        raise _no_regular_file(path, mode)
    descriptor = os.open(path, _FLAGS)
    if not stat.S_ISREG(opened_mode := os.fstat(descriptor).st_mode):  # replaced since os.stat
        os.close(descriptor)
        raise _no_regular_file(path, opened_mode)
    with on_error(partial(os.close, descriptor)):
        refuse_pointer(os.read(descriptor, HEAD), path)
        os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _no_regular_file(path: str | Path, mode: int) -> FormatError:
    """Return the error for a path that is a folder, pipe or device, as its `st_mode` says."""
    actual = _REFUSED_KINDS.get(stat.S_IFMT(mode), "something else")
    return FormatError("Unsupported", f"expected a regular file, got {actual}; write the data to a file", path=path)


def read_regular(path: str | Path, *, limit: int) -> bytes:
    """Read a small regular file; FormatError as `open_regular`, or TooLarge beyond `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FormatError("TooLarge", f"the file has more than {limit} bytes", path=path)
    return data


@lru_cache(maxsize=64)  # skips the call for a logged message; after 64 other ones it is logged again
def note_once(path: Path, message: str) -> None:
    """Log a warning about a file once, however often a command opens it."""
    logger.warning("note: %s: %s", path, message)


def release_pages(view: np.ndarray) -> None:
    """Advise the system to drop the pages of the whole map under a view, which count as memory of this process.

    A later access reads them again from the file. Arrays that are in no map are left alone.
    """
    owner: object = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    mapped = owner.obj if isinstance(owner, memoryview) else owner
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)


class MappedFile:
    """Read-only map of a regular file; views stay valid after `close`, new views raise."""

    def __init__(self, path: str | Path) -> None:
        """Open and map a regular file; follows links. MemoryError without enough address space (`ulimit -v`)."""
        self.path = Path(path)
        descriptor = open_regular(self.path)
        # The finaliser also closes the descriptor if close() is never called; it must not reference `self`.
        self.close = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._state = self._state_now()
        self.size = self._state[0]
        self.map: mmap.mmap | bytes = self._map_file() if self.size else b""
        self._bytes = np.frombuffer(self.map, np.uint8)

    def _map_file(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            message = f"{self.path}: mapping the file needs {self.size / 1e9:.2f} GB of address space"
            available = f"{address_space_left() / 1e9:.2f} GB are left"
            raise MemoryError(f"{message}, {available}; raise ulimit -v") from None

    def error(self, code: ErrorCode, message: str, offset: int | None = None) -> FormatError:
        """Return (not raise) an error that names this file."""
        return FormatError(code, message, path=self.path, offset=offset)

    def view(self, offset: int, n_bytes: int) -> np.ndarray:
        """Return a read-only view of a byte range, which keeps the map alive; raises like `require_unchanged`."""
        self.require_unchanged()
        return self._bytes[offset : offset + n_bytes]

    def require_unchanged(self) -> None:
        """Raise if the file was truncated (Truncated), changed (Inconsistent) or closed (ValueError) since opening."""
        if not self.close.alive:
            raise ValueError(f"{self.path}: the file is closed; open it again to read more tensors")
        state = self._state_now()
        if state[0] < self.size:
            self.require_whole()
        if state != self._state:
            raise self.error("Inconsistent", "the file was changed while open; open it again")

    def require_whole(self) -> None:
        """Raise Truncated if the open file is now shorter than its map; after `close`, check nothing."""
        size = self._state_now()[0] if self.close.alive else self.size
        if size < self.size:
            raise self.error("Truncated", f"the file was cut from {self.size} to {size} bytes while open")

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Identity and state of the file: device, inode, size, modification and change time."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _state_now(self) -> tuple[int, int]:
        """Return size and modification time of the open file; chmod and links alter the change time, not the bytes."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a tensor table, for any format."""

    name: str
    shape: tuple[int, ...]  # slowest axis first
    offset: int  # bytes from the start of the file
    n_bytes: int


EntryT = TypeVar("EntryT", bound=Entry)
Opened = TypeVar("Opened", bound="TensorFile[Any]")  # `Self` fails in beartype, which checks types in the tests


class TensorFile(Generic[EntryT]):
    """One or more open files with a table of named tensors; as a context manager it closes them."""

    stored: Mapping[str, EntryT]  # tensors of the files
    tensors: Mapping[str, EntryT]  # `stored`; in a quantised folder, a matrix under its name replaces codes and scales

    def __init__(self, path: str | Path, *files: MappedFile) -> None:
        """Start with the files that are already open; subclasses set the tables."""
        self.path = Path(path)
        self._files = [*files]
        self._file_of: dict[str, MappedFile] = {}  # for tensors that are not in the first file

    @property
    def fingerprint(self) -> list[tuple[int, ...]]:
        """Fingerprint of each file, see `MappedFile.fingerprint`."""
        return [file.fingerprint for file in self._files]

    def entries_by_file(self) -> list[list[EntryT]]:
        """Return the tensors of each file of the model, in the order of their offsets."""
        entries: dict[MappedFile, list[EntryT]] = {file: [] for file in self._files}
        for entry in sorted(self.stored.values(), key=lambda entry: (entry.offset, entry.n_bytes)):
            entries[self._mapped_file(entry.name)].append(entry)
        return [*entries.values()]

    def file_of(self, name: str) -> Path:
        """Return the path of the file with a tensor."""
        return self._mapped_file(name).path

    def _mapped_file(self, name: str) -> MappedFile:
        return self._file_of.get(name, self._files[0])

    def entry(self, name: str) -> EntryT:
        """Return the table entry of a stored tensor; FormatError Missing for an unknown name."""
        if name not in self.stored:
            message = f"no tensor {name!r} among the {len(self.stored)} tensors"
            raise FormatError("Missing", message, path=self.path)
        return self.stored[name]

    def raw(self, name: str) -> np.ndarray:
        """Return a read-only uint8 view of a tensor; FormatError Missing, Truncated or Inconsistent."""
        entry = self.entry(name)
        return self._mapped_file(name).view(entry.offset, entry.n_bytes)

    def require_whole(self, name: str) -> None:
        """Raise Missing for an unknown name, Truncated if its file was cut since opening and is not closed."""
        self._mapped_file(self.entry(name).name).require_whole()

    def close(self) -> None:
        """Close all files; existing arrays stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
