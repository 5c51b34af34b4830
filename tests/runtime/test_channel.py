"""Frames between this process and a child: a new Python or a copy."""

import os
from collections.abc import Iterator

import pytest
from fakes import worker_programs

from llorch.runtime.channel import Channel, ready
from llorch.runtime.worker import PIPE, Worker
from tests.runtime.test_worker import ECHO

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT RUN: no fork here")


@pytest.fixture(params=ECHO)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with Worker(ECHO[request.param]) as worker:
        worker.channel.seconds = 30
        yield worker


def test_frames_of_every_size_come_back(worker: Worker):
    for size in (0, 1, 100, 3_000_000):  # the last is more than a pipe holds
        data = os.urandom(size)
        worker.channel.send(data)
        assert worker.channel.receive() == data
    worker.channel.send(b"12345")
    with pytest.raises(EOFError):
        worker.channel.receive(most=4)


def test_bytes_after_a_frame_fill_a_buffer():
    def double(channel: Channel) -> None:
        data = bytearray(int(channel.receive()))
        channel.fill(memoryview(data))
        channel.send(b"", data, data)

    data = os.urandom(3_000_000)
    with Worker(double) as worker:
        worker.channel.send(b"3000000", data)
        assert worker.channel.receive() == b""
        twice = bytearray(6_000_000)
        worker.channel.fill(memoryview(twice))
    assert bytes(twice) == data + data


def test_printed_text_of_a_copy_is_read_beside_its_channel():
    with Worker(worker_programs.print_much, output=PIPE) as worker:
        read, answered = b"", False
        while not answered:
            found = ready([worker.channel, worker.output], 30)
            assert found
            if worker.output in found:
                read += worker.output.read(1 << 16)
            answered = worker.channel in found
        assert worker.channel.receive() == b"printed"
        while ready([worker.output], 0):
            read += worker.output.read(1 << 16)
        assert read == b"x" * 1_000_000


def test_objects_come_back():
    def answer(channel: Channel) -> None:
        channel.send_object({"got": channel.receive_object()})

    with Worker(answer) as worker:
        worker.channel.send_object((1, None, "a"))
        assert worker.channel.receive_object() == {"got": (1, None, "a")}
        with pytest.raises(EOFError):
            worker.channel.receive_object()


def test_ready_waits_no_longer_than_it_is_told(worker: Worker):
    assert ready([worker.channel], 0) == []
    worker.channel.send(b"1")
    assert ready([worker.channel]) == [worker.channel]
