"""Atomic writing of a file or folder: written under a temporary name in the same folder, synced, renamed.

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
    """Yield a temporary path to write to, and rename the file to `path` when the body succeeds.

    An existing file at `path` stays until then; it may be the source that is read. After a failure the temporary file
    is removed, and an OSError names `path`.
    """
    _remove_leftovers(path)
    temporary = _temporary_path(path)
    try:
        with _name_in_errors(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces the folder at `path` when the body succeeds; see `new_file`."""
    _remove_leftovers(path)
    temporary, old_folder = _temporary_path(path), _temporary_path(path, "old")
    temporary.mkdir()
    try:
        with _name_in_errors(path):
            yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        if path.exists():
            path.rename(old_folder)
        try:
            temporary.rename(path)
        except BaseException:
            if old_folder.exists():
                old_folder.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(old_folder, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def existing_folder(path: Path) -> Path:
    """Return the nearest existing folder above a path."""
    return next(folder for folder in path.absolute().parents if folder.exists())


@contextmanager
def folders_above(path: Path) -> Iterator[None]:
    """Create the missing folders above a path; if the body fails, remove the created folders that are empty."""
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
def _name_in_errors(path: Path) -> Iterator[None]:
    """Name `path` instead of the temporary file in an OSError of the body."""
    try:
        yield
    except OSError as error:
        is_temporary = error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(f".{path.name}.")
        if is_temporary and error.errno is not None:
            error.filename = str(path)
        raise


def _temporary_path(path: Path, suffix: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{suffix}")


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed runs; restore the old folder if `path` is missing."""
    if os.name != "posix" or not path.parent.is_dir():  # on Windows os.kill(pid, 0) ends the process
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,9}})\.(tmp|old)")
    for name in os.listdir(path.parent):
        match = pattern.fullmatch(name)
        if match is None or _is_running(int(match[1])):
            continue
        leftover = path.parent / name
        if match[2] == "old" and not path.exists():
            leftover.rename(path)
        elif leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _is_running(process_id: int) -> bool:
    if process_id == os.getpid():
        return False  # this process writes one file at a time to a path
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # a process of another user
    return True


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk; does nothing for a folder on Windows."""
    on_windows = not hasattr(os, "O_DIRECTORY")
    if on_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if on_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
