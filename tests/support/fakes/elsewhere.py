"""Takes from this process what Windows does not have, or refuses; imported first, by a process of its own."""

import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

for name in "click gguf jinja2 numpy regex rich.progress safetensors tokenizers".split():  # they see a Unix
    import_module(name)

ABSENT = {
    os: "fork getuid geteuid getgid killpg register_at_fork sched_getaffinity setsid sysconf O_DIRECTORY O_NONBLOCK",
    signal: "SIGALRM SIGHUP SIGKILL SIGPROF SIGUSR1 ITIMER_PROF ITIMER_REAL alarm setitimer pthread_sigmask",
    socket: "AF_UNIX",
    mmap: "MADV_DONTNEED MAP_PRIVATE MAP_SHARED",
}
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
_open, _fsync, _control, _read_only = os.open, os.fsync, fcntl.fcntl, (fcntl.F_GETFL, os.O_ACCMODE, os.O_RDONLY)


class Map(mmap.mmap):
    """A map that cannot be advised."""

    def __getattribute__(self, name: str) -> object:
        if name == "madvise":
            raise AttributeError("'mmap.mmap' object has no attribute 'madvise'")
        return super().__getattribute__(name)


def open_file(path: str, flags: int, *args: int, **kwargs: int) -> int:
    """Open a file; a folder is none."""
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return _open(path, flags, *args, **kwargs)


def fsync(descriptor: int) -> None:
    """Sync what was opened to be written."""
    question, mask, read_only = _read_only
    if _control(descriptor, question) & mask == read_only:
        raise OSError(errno.EBADF, "Bad file descriptor")
    _fsync(descriptor)


def go() -> None:
    """Be elsewhere from here on."""
    for module, names in ABSENT.items():
        for name in names.split():
            delattr(module, name)
    sys.modules |= dict.fromkeys(MODULES)  # pyright: ignore[reportAttributeAccessIssue]
    subprocess.Popen.kill = subprocess.Popen.terminate
    mmap.mmap = Map  # pyright: ignore[reportAttributeAccessIssue]
    os.open, os.fsync = open_file, fsync
    patch("shutil._use_fd_functions", False).start()


go()
