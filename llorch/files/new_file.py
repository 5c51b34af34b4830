"""A new file or folder that is complete or absent: written under another name beside its place, synced, renamed.

Source: POSIX rename (atomic within a file system) and fsync (a rename may reach the disk before the data does).
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a name in the same folder to write to, and move the file to its place when the body ends well.

    What lies at the place stays until then; it may be the file that is being read. After a failure the new one is
    removed, and an OSError of the body names the place where it named no file.
    """
    _remove_leftovers(path)
    temporary = _temporary_path(path)
    try:
        with _naming(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces the folder at `path` when the block ends well; see `new_file`."""
    _remove_leftovers(path)
    temporary, old = _temporary_path(path), _temporary_path(path, "old")
    temporary.mkdir()
    try:
        with _naming(path):
            yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def existing_folder(path: Path) -> Path:
    """Find the folder of a place, or the nearest one above it that is there."""
    return next(folder for folder in path.absolute().parents if folder.exists())


@contextmanager
def folders_above(path: Path) -> Iterator[None]:
    """Make the missing folders above a place; a failure of the body removes those that are empty."""
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the path in an OSError of the block, in place of the temporary file."""
    try:
        yield
    except OSError as error:
        is_ours = error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(f".{path.name}.")
        if is_ours and error.errno is not None:
            error.filename = str(path)
        raise


def _temporary_path(path: Path, ending: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


def _remove_leftovers(path: Path) -> None:
    """Remove what runs that were killed left beside a place; put the old folder back where they left none there."""
    if os.name != "posix" or not path.parent.is_dir():  # elsewhere nobody can ask for a process without ending it
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,9}})\.(tmp|old)")
    for name in os.listdir(path.parent):
        found = pattern.fullmatch(name)
        if found is None or _runs(int(found[1])):
            continue
        leftover = path.parent / name
        if found[2] == "old" and not path.exists():
            leftover.rename(path)
        elif leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    """Tell whether another process has this number."""
    if process == os.getpid():
        return False  # this one writes no two files to one place at a time
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # of another user
    return True


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, lie on the device; nobody can for a folder of Windows."""
    on_windows = not hasattr(os, "O_DIRECTORY")
    if on_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if on_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
