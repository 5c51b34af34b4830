"""The file operations of a snapshot, one method each, so that tests can make any one of them fail.

Source: SQLite's VFS and its fault injection (https://www.sqlite.org/testing.html); fsync(2), rename(2).
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class Disk:
    """The operations as the system does them; each raises OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a folder in one that exists."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a file that must be new, and give its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of the bytes, and say how many."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written lies on the device."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder lie on the device."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file or folder another name, in one step."""
        path.rename(target)

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        """Whether there is something of this name."""
        return path.exists()


def write_new_file(disk: Disk, path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that must be new, and wait until it lies on the device; after an OSError part of it may be there."""
    descriptor = disk.create(path)
    try:
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                rest = rest[disk.write(descriptor, rest) :]
        disk.sync(descriptor)
    except BaseException:
        with suppress(OSError):
            disk.close(descriptor)
        raise
    disk.close(descriptor)


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a folder of files; after an OSError part of it may be left."""
    for name in disk.names(path):
        disk.remove_file(path / name)
    disk.remove_folder(path)
