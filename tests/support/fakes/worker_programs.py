"""Functions for the child processes of tests/runtime/test_worker.py."""

import os
import subprocess
import sys
import time

from llorch.runtime.channel import Channel, stdio_channel
from llorch.runtime.worker import end_with_parent, limit_memory


def echo() -> None:
    """Answer each frame with itself, in a new Python."""
    echo_in(stdio_channel())


def echo_in(channel: Channel) -> None:
    while True:
        channel.send(channel.receive())


def die(channel: Channel, number: int) -> None:
    channel.receive()
    os.kill(os.getpid(), number)


def sleep(_channel: Channel | None = None) -> None:
    time.sleep(600)


def spin(_channel: Channel | None = None) -> None:
    while True:
        pass


def start_a_child(channel: Channel) -> None:
    """Send the process id of a program that runs on."""
    started = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    channel.send(str(started.pid).encode())
    channel.receive()
    os._exit(3)


def take_memory(channel: Channel, kind: str) -> None:
    channel.receive()
    limit_memory(1 << 30, kind=kind)  # type: ignore[arg-type]
    try:
        bytearray(2 << 30)
        channel.send(b"allocated")
    except MemoryError:
        channel.send(b"MemoryError")


def take_memory_apart(kind: str) -> None:
    take_memory(stdio_channel(), kind)


def print_much(channel: Channel) -> None:
    print(sys.stdin.read(), end="")
    os.write(1, b"x" * 1_000_000)
    channel.send(b"printed")
    channel.receive()


def hold_stdin_and_spin() -> None:
    end_with_parent()
    os.write(2, f"{os.getpid()}\n".encode())
    spin()
