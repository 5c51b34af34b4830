"""A server starts with one line where it cannot, and leaves without a loss when it is asked to."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fakes.raw_http import PATIENCE, answer, ask, connect, error_code, is_closed, request, served, until
from helpers.refusals import refuses

pytest.importorskip("uvicorn", reason="NOT RUN: uvicorn is not installed")

WAITING = """
import asyncio, os, sys
from llorch.apps.serve.connection import ClientLimits
from llorch.apps.serve.server import bind, serve

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    if scope["path"] == "/wait":
        await send({"type": "http.response.body", "body": b"do", "more_body": True})
        await loop(os.read, 0, 1)
    await send({"type": "http.response.body", "body": b"ne" if scope["path"] == "/wait" else b"done"})

def loop(function, *arguments):
    return asyncio.get_running_loop().run_in_executor(None, function, *arguments)

def ready(running):
    print(running.url, flush=True)

serve(app, bind("127.0.0.1", 0), ready=ready, limits=ClientLimits(grace_seconds=float(sys.argv[1])),
      on_stop=lambda: print("stopping", flush=True))
"""


def start(grace: float = PATIENCE) -> tuple[subprocess.Popen, int]:
    """A server whose /wait goes on when it gets a byte on stdin; its process and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(grace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert process.stdout
    return process, int(process.stdout.readline().rpartition(":")[2])


def end(process: subprocess.Popen, answered: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(answered, timeout=PATIENCE)
    return process.returncode, out, err


def receive(client: socket.socket, expected: bytes) -> bytes:
    data = b""
    while expected not in data:
        data += client.recv(1000) or pytest.fail(f"the server left, having said {data!r}")
    return data


def test_sigterm_without_work_ends_at_once_with_zero():
    process, port = start()
    with connect(port, request()) as idle, connect(port, b"GET") as half:
        assert answer(idle)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert end(process) == (0, "stopping\n", "")
        assert is_closed(idle)
        assert is_closed(half)


def test_sigint_is_the_interrupt_that_it_is_elsewhere():
    process, _ = start()
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert (code, out) == (-signal.SIGINT, "stopping\n")
    assert err.strip().endswith("KeyboardInterrupt")


def test_sigterm_lets_an_answer_finish_and_takes_no_new_work():
    process, port = start()
    with connect(port, request(path="/wait")) as client, connect(port, request()) as idle:
        receive(client, b"\r\n\r\ndo")
        assert answer(idle)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout
        assert process.stdout.readline() == "stopping\n"
        assert is_closed(idle)
        for path in ("/", "/health"):
            status, headers, body = ask(port, request(path=path))
            assert (status, error_code(body), headers["connection"]) == (503, "stopping", "close")
            assert int(headers["retry-after"]) > 0
        assert process.poll() is None
        code = end(process, "x")
        assert receive(client, b"ne") == b"ne"
        assert is_closed(client)
        assert code == (0, "", "")


def test_an_answer_that_takes_longer_than_the_grace_is_cut():
    process, port = start(grace=0.2)
    with connect(port, request(path="/wait")) as client:
        receive(client, b"\r\n\r\ndo")
        process.send_signal(signal.SIGTERM)
        assert is_closed(client)
        assert end(process, "x")[:2] == (0, "stopping\n")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process_at_once(second: signal.Signals):
    process, port = start()
    with connect(port, request(path="/wait")) as client:
        receive(client, b"\r\n\r\ndo")
        process.send_signal(signal.SIGTERM)
        assert process.stdout
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(second)
        assert process.wait(PATIENCE) == 128 + second
        end(process)


async def nothing(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_server_ends_with_the_error_that_stopped_it():
    from llorch.apps.serve.server import bind, serve

    class EngineDead(RuntimeError):
        pass

    with pytest.raises(EngineDead, match="twice"):
        serve(nothing, bind("127.0.0.1", 0), ready=lambda running: running.stop(EngineDead("twice")))


def test_stopping_twice_or_when_all_is_over_changes_nothing():
    with served(nothing) as running:
        assert ask(running.port, request())[0] == 204
        running.stop()
        running.thread.join(PATIENCE)
        running.stop()


def test_a_port_in_use_is_one_line():
    from llorch.apps.serve.server import bind

    with served(nothing) as running:
        with refuses(ValueError, "serve", f"127.0.0.1:{running.port}", "already in use"):
            bind("127.0.0.1", running.port)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("", 0), ("no.such.host.invalid", 0), ("a" * 70, 0), ("x\0", 0)]
)
def test_foreign_address_is_one_line(host: str, port: int):
    from llorch.apps.serve.server import bind

    with refuses(ValueError, "serve") as caught:
        bind(host, port)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_the_address_is_said_as_a_browser_wants_it(host: str, url: str):
    if host == "::1" and not has_ipv6():
        pytest.skip("NOT RUN: this machine has no ::1")
    with served(nothing, host=host) as running:
        assert running.url == f"{url}{running.port}"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_more_connections_than_the_process_may_open_are_not_promised():
    import resource

    from llorch.apps.serve.connection import ClientLimits
    from llorch.apps.serve.server import RESERVED_FILES, _limit_to_open_files

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert _limit_to_open_files(ClientLimits(connections=300)).connections == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300 + RESERVED_FILES
        assert _limit_to_open_files(ClientLimits(connections=10**9)).connections == before[1] - RESERVED_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
def test_one_thousand_half_open_connections_leave_others_alone():
    with served(nothing) as running:
        half = [connect(running.port, b"GET / HTTP/1.1\r\n") for _ in range(1000)]
        until(lambda: len(running.connections) == 1000)
        assert ask(running.port, request())[0] == 204
        assert len([thread for thread in threading.enumerate() if thread.name.startswith("asyncio")]) <= 1
        for client in half:
            client.close()
