"""Frames of bytes between two processes: a length of eight bytes, lowest byte first, and so many bytes.

`worker` makes the channel of a child; `own_channel` takes it in a child that is a new Python.
"""

import os
import pickle
import select
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_LENGTH = 8  # bytes


class Channel:
    """Frames of bytes to and from another process. EOFError or OSError if the other process is gone.

    Attributes:
        seconds: Time that the other process may be silent, else TimeoutError; None for ever.
    """

    def __init__(self, source: Any, sink: Any) -> None:
        """Take two unbuffered files, one to read and one to write."""
        self.seconds: float | None = None
        self._source, self._sink = source, sink
        if hasattr(select, "poll"):
            for file in (source, sink):
                os.set_blocking(file.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor that has something to read when a frame comes."""
        return self._source.fileno()

    def send(self, data: bytes | bytearray | memoryview, *after: bytes | bytearray | memoryview) -> None:
        """Send a frame, and then bytes whose number the receiver knows (see `fill`)."""
        for part in (len(data).to_bytes(_LENGTH, "little") + data, *after):
            rest = memoryview(part)
            while rest:
                if n := self._sink.write(rest):
                    rest = rest[n:]
                else:
                    self._wait(self._sink, "POLLOUT")

    def receive(self, most: int | None = None) -> bytearray:
        """Receive a frame; EOFError if it is longer than `most`."""
        header = bytearray(_LENGTH)
        self.fill(memoryview(header))
        length = int.from_bytes(header, "little")
        if most is not None and length > most:
            raise EOFError(f"expected at most {most} bytes, got {length}")
        data = bytearray(length)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as a buffer has."""
        while view:
            n = self._source.readinto(view)
            if n == 0:
                raise EOFError("the other process is gone")
            if n is None:
                self._wait(self._source, "POLLIN")
            else:
                view = view[n:]

    def send_object(self, value: object) -> None:
        """Send a value to a process of the same program."""
        self.send(pickle.dumps(value))

    def receive_object(self) -> Any:
        """Receive the value of `send_object`."""
        return pickle.loads(self.receive())

    def close(self) -> None:
        """Close both directions."""
        for file in (self._source, self._sink):
            with suppress(OSError):
                file.close()

    def _wait(self, file: Any, event: str) -> None:
        """Wait until the file is ready for a poll event, given by name; raise TimeoutError after `seconds`."""
        waiting = select.poll()
        waiting.register(file, getattr(select, event))
        if not waiting.poll(None if self.seconds is None else 1000 * self.seconds):
            raise TimeoutError(f"no answer for {self.seconds:g} s")


def ready(files: Iterable[Any], seconds: float | None = None) -> list[Any]:
    """Return the channels and pipes that have something to read or are closed; wait until there is one."""
    if sys.platform != "win32":
        from multiprocessing.connection import wait

        return wait([*files], seconds)
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    while not (found := [file for file in files if _has_bytes(file)]) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _has_bytes(file: Any) -> bool:
    """Tell if a read from a Windows pipe would return at once; a closed pipe counts as ready."""
    import _winapi
    import msvcrt

    try:
        return _winapi.PeekNamedPipe(msvcrt.get_osfhandle(file.fileno()), 0)[0] > 0  # pyright: ignore
    except OSError:
        return True  # it is closed


def own_channel() -> Channel:
    """Take the channel of this child from stdin and stdout: stdin is empty then, and stdout is stderr."""
    channel = Channel(open(os.dup(0), "rb", 0), open(os.dup(1), "wb", 0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return channel
