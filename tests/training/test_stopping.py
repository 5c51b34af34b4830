"""Signals that end a run."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from helpers.command_line import REPOSITORY

from llorch.training.stopping import StopRequest

TWICE = """
import os, signal
from llorch.training.stopping import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(int(stop.number), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_nothing_else_happens(number: signal.Signals):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.number is None
        os.kill(os.getpid(), number)
        assert stop.number == number
    assert signal.getsignal(number) is before


def test_second_signal_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "15\n")


def test_outside_the_main_thread_there_is_nothing_to_listen_to():
    seen = []

    def run() -> None:
        with StopRequest() as stop:
            seen.append(stop.number)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
