"""What happens while a folder is watched: files are saved, keys are pressed. Each is seen by a thread of its own."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

SAVED = ""  # among keys, which are one character
_PERIOD = 0.1  # seconds between looks at the files


@contextmanager
def events(folder: Path) -> Iterator["SimpleQueue[str]"]:
    """Give a queue of keys, and of SAVED for changes of Python files; keys only where stdin is a terminal."""
    queue: SimpleQueue[str] = SimpleQueue()
    Thread(target=_watch, args=(folder, _seen(folder), queue), daemon=True).start()
    with _single_keys() as are_keys:
        if are_keys:
            Thread(target=_read_keys, args=(queue,), daemon=True).start()
        yield queue


def _watch(folder: Path, before: "dict[Path, tuple[int, int]]", queue: "SimpleQueue[str]") -> None:
    """Note what is other than before, so that a save is not lost that comes while the watching begins."""
    for _ in _times_to_look(folder):
        if (now := _seen(folder)) != before:
            queue.put(SAVED)
        before = now


def _times_to_look(folder: Path) -> Iterator[object]:
    """Yield whenever a folder may have changed: told by watchfiles, or by the clock where watchfiles cannot watch."""
    with suppress(ImportError, OSError):
        from watchfiles import PythonFilter, watch

        yield from watch(
            folder, watch_filter=PythonFilter(), recursive=False, debounce=100, step=20,
            rust_timeout=1000, yield_on_timeout=True,
        )  # fmt: skip
    while True:
        yield time.sleep(_PERIOD)


def _seen(folder: Path) -> dict[Path, tuple[int, int]]:
    """Map each Python file of a folder to its modification time in ns and its size in bytes."""
    seen = {}
    for path in folder.glob("*.py"):
        with suppress(OSError):  # it went away
            status = path.stat()
            seen[path] = (status.st_mtime_ns, status.st_size)
    return seen


@contextmanager
def _single_keys() -> Iterator[bool]:
    """Have keys come at once and unseen; what the terminal was is put back."""
    if find_spec("termios") is None or not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin.fileno())
    tty.setcbreak(sys.stdin.fileno())
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def _read_keys(queue: "SimpleQueue[str]") -> None:
    """Put each key that is pressed into the queue, and "q" when the terminal is gone."""
    with suppress(OSError):
        while key := os.read(
            sys.stdin.fileno(), 1
        ):  # not through sys.stdin, whose lock a copied process would wait for
            queue.put(key.decode("ascii", "replace"))
    queue.put("q")  # the terminal is gone
