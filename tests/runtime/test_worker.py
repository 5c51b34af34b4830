"""Child processes that die, hang, flood or take memory, and children of a process that is killed."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from fakes import worker_programs
from helpers.command_line import REPOSITORY

from llorch.runtime.channel import Channel, ready
from llorch.runtime.worker import DEVNULL, PIPE, Worker, last_line, python, run, signal_name
from tests.files.tokenizer.test_template_process import ends_within, running

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT RUN: no fork here")
Start = list[str] | Callable[[Channel], object]
ECHO: dict[str, Start] = {"a new Python": python("fakes.worker_programs:echo"), "a copy": worker_programs.echo_in}


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, signal, subprocess, sys, time\n{text}"]


@pytest.fixture(params=ECHO)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with Worker(ECHO[request.param]) as worker:
        worker.channel.seconds = 30
        yield worker


@pytest.mark.parametrize(
    ("text", "status", "output", "errors", "limit"),
    [
        ("print(1); print(2, file=sys.stderr); sys.exit(3)", 3, b"1\n", b"2\n", ""),
        ("print(sys.stdin.read(), end='')", 0, b"given", b"", ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, b"", b"", ""),
        ("print(1, flush=True); time.sleep(60)", -signal.SIGKILL, b"1\n", b"", "time"),
        ("os.close(1); os.close(2); time.sleep(60)", -signal.SIGKILL, b"", b"", "exit"),
        ("subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(6)'])", 0, b"", b"", "time"),
    ],
    ids=["exits", "reads", "dies", "hangs", "closes", "leaves a child"],
)
def test_run_stops_a_program_at_its_limit_and_reports_the_status(
    text: str, status: int, output: bytes, errors: bytes, limit
):
    seconds = 3 if limit else 60
    ended = run(program(text), seconds=seconds, stdin=b"given", session=text.startswith("subprocess"))
    assert (ended.status, ended.output, ended.errors, ended.limit) == (status, output, errors, limit)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_run_stops_excessive_output_at_the_limit(stream: str):
    text = f"while True: sys.{stream}.write('y' * 100_000)"
    ended = run(program(text), seconds=60, most=1 << 20)
    assert ended.limit == "output"
    assert 1 << 20 < max(len(ended.output), len(ended.errors)) <= (1 << 20) + (1 << 16)


def test_run_drops_or_passes_on_stderr(capfd: pytest.CaptureFixture[str]):
    text = "print(1, file=sys.stderr)"
    assert run(program(text), seconds=60, errors=DEVNULL).errors == b""
    assert run(program(text), seconds=60, errors=None).errors == b""
    assert capfd.readouterr().err == "1\n"


def test_run_refuses_a_missing_program(tmp_path):
    with pytest.raises(FileNotFoundError):
        run([str(tmp_path / "none")], seconds=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_fork_is_an_error_with_its_status(number: int):
    with Worker(lambda channel: worker_programs.die(channel, number)) as worker:
        assert (worker.runs, worker.status) == (True, None)
        worker.channel.send(b"")
        with pytest.raises(EOFError):
            worker.channel.receive()
        assert worker.wait(30) == -number
        assert (worker.runs, signal_name(-number)) == (False, signal.Signals(number).name)
    assert worker.end() == -number


def test_killed_child_is_detected(worker: Worker):
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        worker.channel.receive()
    assert worker.wait(30) == -signal.SIGKILL
    with pytest.raises(BrokenPipeError):
        worker.channel.send(b"1")


@pytest.mark.parametrize("start", [worker_programs.sleep, worker_programs.spin, python("fakes.worker_programs:sleep")])
def test_a_child_that_hangs_is_a_timeout_and_is_ended(start: Start):
    with Worker(start) as worker:
        worker.channel.seconds = 0.2
        with pytest.raises(TimeoutError):
            worker.channel.receive()
        with pytest.raises(TimeoutError):
            worker.channel.send(b"1" * 1_000_000)  # nobody reads
        assert worker.runs
        assert worker.wait(0.01) is None
        assert worker.end() == -signal.SIGKILL
    assert not running(worker.pid)


def test_processes_of_a_child_end_with_it():
    with Worker(worker_programs.start_a_child) as worker:
        grandchild = int(worker.channel.receive())
        assert running(grandchild)
    assert ends_within(10, grandchild)
    with Worker(worker_programs.start_a_child) as worker:
        grandchild = int(worker.channel.receive())
        worker.channel.send(b"")
        assert worker.wait(30) == 3  # it leaves the grandchild behind
        assert ends_within(10, grandchild)


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "new"])
def test_memory_is_limited(kind: str, is_copy: bool):
    def copy(channel: Channel) -> None:
        worker_programs.take_memory(channel, kind)

    apart = python("fakes.worker_programs:take_memory_apart", kind)
    with Worker(copy if is_copy and kind == "RLIMIT_DATA" else apart) as worker:
        worker.channel.send(b"")
        assert worker.channel.receive() == b"MemoryError"


def test_memory_of_a_session_is_known(worker: Worker):
    worker.channel.send(b"")
    worker.channel.receive()
    assert 1 << 20 < worker.held_bytes < 1 << 40


def test_a_program_without_a_channel_writes_to_a_file(tmp_path):
    with (tmp_path / "said").open("wb") as file:
        worker = Worker(program("print(sys.stdin.read()); print(' a  b ', file=sys.stderr)"), talks=False, output=file)
    assert worker.wait(30) == 0
    assert last_line((tmp_path / "said").read_bytes()) == "a b"
    worker.end()


def test_unreferenced_worker_ends():
    worker = Worker(worker_programs.sleep)
    pid = worker.pid
    del worker
    gc.collect()
    assert not running(pid)


PARENT = """
import os, signal, sys, time
sys.path.insert(0, {support!r})
from fakes import worker_programs
from llorch.runtime.channel import ready
from llorch.runtime.worker import PIPE, Worker, python, run
{start}
print(worker.pid, flush=True)
{end}
"""
STARTS = {
    "idle Python": "worker = Worker(python('fakes.worker_programs:echo')).__enter__()\nready([worker.channel], 2)",
    "busy copy": "worker = Worker(worker_programs.spin)\ntime.sleep(0.2)",
    "two copies": "first = Worker(worker_programs.echo_in); worker = Worker(worker_programs.sleep)\ntime.sleep(0.2)",
}
ENDS = {"killed": "os.kill(os.getpid(), signal.SIGKILL)", "aborts": "os.abort()", "exits": "", "raises": "1 / 0"}


def start_parent(start: str, end: str) -> subprocess.CompletedProcess[str]:
    code = PARENT.format(support=str(REPOSITORY / "tests" / "support"), start=start, end=end)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=60)


@pytest.mark.parametrize(("start", "end"), [*((s, "killed") for s in STARTS), *(("busy copy", e) for e in ENDS)][:-1])
def test_a_child_ends_with_its_parent_however_it_ends(start: str, end: str):
    done = start_parent(STARTS[start], ENDS[end])
    assert ends_within(10, int(done.stdout))


def test_a_program_that_watches_its_stdin_ends_with_a_parent_that_is_killed():
    start = "run(python('fakes.worker_programs:hold_stdin_and_spin'), seconds=60, stdin=PIPE, errors=None)"
    code = PARENT.format(support=str(REPOSITORY / "tests" / "support"), start=start, end="")
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as parent:
        assert parent.stderr is not None
        child = int(parent.stderr.readline())
        parent.kill()
        ended = ends_within(10, child)
        if not ended:
            os.kill(child, signal.SIGKILL)
    assert ended


def test_forked_worker_does_not_affect_the_workers_of_its_parent():
    with Worker(worker_programs.echo_in) as first:

        def look(channel: Channel) -> None:
            first.end()
            channel.send(str(first.runs).encode())
            time.sleep(600)

        with Worker(look) as second:
            assert second.channel.receive() == b"False"
            assert first.runs
            first.channel.send(b"1")
            assert first.channel.receive() == b"1"
            first.channel.close()  # the other copy holds no end of it
            assert first.wait(30) is not None


def test_frames_of_every_size_round_trip(worker: Worker):
    for size in (0, 1, 100, 3_000_000):  # the last is more than a pipe holds
        data = os.urandom(size)
        worker.channel.send(data)
        assert worker.channel.receive() == data
    worker.channel.send(b"12345")
    with pytest.raises(EOFError):
        worker.channel.receive(max_bytes=4)


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


def test_stdout_of_a_fork_is_separate_from_its_channel():
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


def test_objects_round_trip():
    def answer(channel: Channel) -> None:
        channel.send_object({"got": channel.receive_object()})

    with Worker(answer) as worker:
        worker.channel.send_object((1, None, "a"))
        assert worker.channel.receive_object() == {"got": (1, None, "a")}
        with pytest.raises(EOFError):
            worker.channel.receive_object()


def test_ready_respects_its_timeout(worker: Worker):
    assert ready([worker.channel], 0) == []
    worker.channel.send(b"1")
    assert ready([worker.channel]) == [worker.channel]
