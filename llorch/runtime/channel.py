"""Frames of bytes between two processes: a length of eight bytes, little-endian, then the data.

`worker` creates the channel of a child; a child that is a new Python gets it from `stdio_channel`.
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
        seconds: Longest wait for the other process before TimeoutError; None for no limit.
    """

    def __init__(self, source: Any, sink: Any) -> None:
        """Use two unbuffered files, one to read and one to write."""
        self.seconds: float | None = None
        self._source, self._sink = source, sink
        if hasattr(select, "poll"):
            for file in (source, sink):
                os.set_blocking(file.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a frame arrives."""
        return self._source.fileno()

    def send(self, data: bytes | bytearray | memoryview, *buffers: bytes | bytearray | memoryview) -> None:
        """Send a frame, then buffers without a length, which the receiver reads by `fill`."""
        for buffer in (len(data).to_bytes(_LENGTH, "little") + data, *buffers):
            unsent = memoryview(buffer)
            while unsent:
                if n_written := self._sink.write(unsent):
                    unsent = unsent[n_written:]
                else:
                    self._wait(self._sink, "POLLOUT")

    def receive(self, max_bytes: int | None = None) -> bytearray:
        """Receive a frame; EOFError if it is longer than `max_bytes`."""
        header = bytearray(_LENGTH)
        self.fill(memoryview(header))
        length = int.from_bytes(header, "little")
        if max_bytes is not None and length > max_bytes:
            raise EOFError(f"expected at most {max_bytes} bytes, got {length}")
        data = bytearray(length)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Receive bytes until a buffer is full."""
        while view:
            n_read = self._source.readinto(view)
            if n_read == 0:
                raise EOFError("the other process is gone")
            if n_read is None:
                self._wait(self._source, "POLLIN")
            else:
                view = view[n_read:]

    def send_object(self, value: object) -> None:
        """Send a pickled value to a process of the same program."""
        self.send(pickle.dumps(value))

    def receive_object(self) -> Any:
        """Receive a value that `send_object` sent."""
        return pickle.loads(self.receive())

    def close(self) -> None:
        """Close both directions."""
        for file in (self._source, self._sink):
            with suppress(OSError):
                file.close()

    def _wait(self, file: Any, event: str) -> None:
        """Wait until the file is ready for a poll event, given by name; raise TimeoutError after `seconds`."""
        poll = select.poll()
        poll.register(file, getattr(select, event))
        if not poll.poll(None if self.seconds is None else 1000 * self.seconds):
            raise TimeoutError(f"no answer for {self.seconds:g} s")


def ready(files: Iterable[Any], seconds: float | None = None) -> list[Any]:
    """Return the channels and pipes that are readable or closed; wait until there is one."""
    if sys.platform != "win32":
        from multiprocessing.connection import wait

        return wait([*files], seconds)
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
    while not (ready_files := [file for file in files if _has_bytes(file)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ready_files


def _has_bytes(file: Any) -> bool:
    """Check if a read from a Windows pipe would return at once; a closed pipe counts as ready."""
    import _winapi
    import msvcrt

    try:
        return _winapi.PeekNamedPipe(msvcrt.get_osfhandle(file.fileno()), 0)[0] > 0  # pyright: ignore
    except OSError:
        return True  # the pipe is closed


def stdio_channel() -> Channel:
    """Return the channel of this child, made of stdin and stdout; then prints go to stderr, and stdin is empty."""
    channel = Channel(open(os.dup(0), "rb", 0), open(os.dup(1), "wb", 0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return channel
