"""What a client can make the server wait for has an end, and only its own connection suffers."""

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
from fakes.raw_http import answer, ask, connect, error_code, is_closed, request, served, until

pytest.importorskip("uvicorn", reason="NOT RUN: uvicorn is not installed")

BIG = 32 * 2**20  # bytes, more than the system's buffers of a connection hold


async def echo(scope, receive, send):
    """Says how long the body was, or much without end at /much."""
    n, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        n, more = n + len(message["body"]), message["more_body"]
    body = b"x" * BIG if scope["path"] == "/much" else f"{scope['method']} {n}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def limits(**values):
    from llorch.apps.serve.connection import ClientLimits

    return ClientLimits(**values)


@pytest.fixture(scope="module")
def port():
    with served(echo) as running:
        yield running.port


def test_requests_follow_each_other_on_one_connection(port: int):
    with connect(port) as client:
        for body in (b"", b"abc", b""):
            client.sendall(request("POST", "/", body))
            assert answer(client)[2] == f"POST {len(body)}".encode()


def long_name(n: int) -> dict[str, Any]:
    return {"y" * n: "x"}


MANY: dict[str, Any] = {f"x{n:07}": "y" for n in range(2000)}


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (request(x="y" * 20000), 431, "headers_too_large"),
        (request(path="/" + "y" * 20000), 431, "headers_too_large"),
        (request(**long_name(20000)), 431, "headers_too_large"),
        (request(path="/" + "y" * 6000, x="y" * 6000, **long_name(6000)), 431, "headers_too_large"),
        (request(**MANY), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 20000, 431, "headers_too_large"),
        (request("POST", "/", b"0\r\n\r\n", transfer_encoding="chunked"), 400, "malformed_request"),
        (request(transfer_encoding="gzip"), 400, "malformed_request"),
        (b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "malformed_request"),
        (request(content_length="-1"), 400, "malformed_request"),
        (request(content_length="1" * 30), 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx : y\r\n\r\n", 400, "malformed_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n", 400, "malformed_request"),
        (request("POST", "/", b"", transfer_encoding="chunked") + b"zz\r\n", 400, "malformed_request"),
    ],
)
def test_invalid_request_is_refused_and_the_connection_closed(port: int, data: bytes, status: int, code: str):
    with connect(port, data) as client:
        actual, headers, body = answer(client)
        assert (actual, error_code(body), headers["connection"]) == (status, code, "close")
        assert is_closed(client)


def test_client_that_only_sends_reads_the_refusal_at_the_end(port: int):
    with connect(port, b"GET / HTTP/1.1\r\nx: " + b"y" * 3 * 2**20) as client:
        assert answer(client)[0] == 431
        assert is_closed(client)


def test_headers_a_little_below_the_limit_pass(port: int):
    assert ask(port, request(x="y" * 16000))[0] == 200


@pytest.mark.parametrize(
    ("data", "missing_part"),
    [
        (b"", b"headers"),
        (b"GET / HTTP/1.1\r\nhost: loc", b"headers"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nab", b"body"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"body"),
        (request() + b"GET / HT", b"headers"),
        (request() + b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nab", b"body"),
    ],
)
def test_late_headers_and_bodies_are_refused(data: bytes, missing_part: bytes):
    with served(echo, limits=limits(header_seconds=0.2, body_seconds=0.2)) as running:
        with connect(running.port, data) as client:
            if data.startswith(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"):
                assert answer(client)[0] == 200
            status, _, body = answer(client)
            assert (status, error_code(body)) == (408, "request_timeout")
            assert b"the " + missing_part in body
            assert is_closed(client)


def test_refused_client_that_never_closes_is_closed():
    with served(echo) as running, connect(running.port, b"x\r\n\r\n") as client:
        assert answer(client)[0] == 400
        until(lambda: not running.connections)


def test_bytes_that_trickle_in_do_not_move_the_deadline():
    with served(echo, limits=limits(header_seconds=0.5)) as running, connect(running.port) as client:
        client.settimeout(0.05)
        for _ in range(200):
            try:
                client.sendall(b"x")
                if b"408" in client.recv(1000):
                    return
            except TimeoutError:
                continue
        raise AssertionError("it would wait for ever")


def test_a_connection_without_another_request_is_closed_in_silence():
    with served(echo, limits=limits(idle_seconds=0.2)) as running, connect(running.port, request()) as client:
        assert answer(client)[0] == 200
        assert client.recv(1) == b""


def test_a_body_that_nobody_waits_for_has_a_deadline_too():
    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    with served(refuse, limits=limits(body_seconds=0.3)) as running, connect(running.port, head) as client:
        assert answer(client)[0] == 413
        assert is_closed(client)


def test_client_that_does_not_read_is_dropped():
    with served(echo, limits=limits(unread_seconds=0.3)) as running:
        with connect(running.port, request(path="/much"), read_buffer=4096):
            until(lambda: bool(running.connections))
            until(lambda: not running.connections)


def test_client_that_does_not_read_keeps_nobody_from_leaving():
    with served(echo) as running:
        with connect(running.port, request(path="/much"), read_buffer=4096):
            until(lambda: [each.awaited for each in running.connections] == ["another"])
            running.stop()
            running.thread.join()
            assert not running.connections


def test_client_that_still_reads_does_not_make_room():
    with served(echo, limits=limits(connections=2)) as running:
        with connect(running.port, request(path="/much"), read_buffer=65536) as reader:
            until(lambda: [each.awaited for each in running.connections] == ["another"])
            with connect(running.port, b"GET") as half:
                until(lambda: len(running.connections) == 2)
                assert ask(running.port, request())[0] == 200
                assert is_closed(half)
            n = 0
            while n < BIG:
                n += len(reader.recv(2**20))


def test_slow_client_gets_everything():
    with served(echo, limits=limits(unread_seconds=0.3)) as running:
        with connect(running.port, request(path="/much"), read_buffer=65536) as client:
            n = 0
            while n < BIG:
                n += len(client.recv(2**20))
                if n < BIG // 8:
                    time.sleep(0.01)


def test_longest_waiting_connection_makes_room():
    with served(echo, limits=limits(connections=3)) as running:
        clients = [connect(running.port, b"GET") for _ in range(3)]
        assert ask(running.port, request())[0] == 200
        assert is_closed(clients[0])
        for client in clients[1:]:
            client.sendall(b" / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert answer(client)[0] == 200
            client.close()
        clients[0].close()


def test_no_room_where_all_have_an_answer_coming():
    with served(echo, limits=limits(connections=2)) as running:
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"
        clients = [connect(running.port, head) for _ in range(2)]
        until(lambda: [c.awaited for c in running.connections] == ["body", "body"])
        status, headers, body = ask(running.port, request())
        assert (status, error_code(body), headers["retry-after"]) == (503, "too_many_connections", "1")
        for client in clients:
            client.sendall(b"ab")
            assert answer(client)[2] == b"POST 2"
            client.close()


class Slow:
    """Answers when it is told to; notes who left before."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []
        self._goes_on = threading.Event()

    async def __call__(self, scope, receive, send):
        assert not (await receive())["more_body"]
        self.asked.append(scope["path"])
        gone = asyncio.ensure_future(receive())
        while not self._goes_on.is_set():
            if gone.done():
                self.left.append(scope["path"])
                return
            await asyncio.sleep(0.005)
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    def go_on(self) -> None:
        self._goes_on.set()


def everything(client: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    while more := client.recv(65536):
        data += more
    return data


def test_a_client_that_has_closed_its_own_side_is_answered_and_then_the_connection_closed():
    app = Slow()
    with served(app) as running, connect(running.port, request("POST", "/", b"abc")) as client:
        until(lambda: app.asked == ["/"])
        client.shutdown(socket.SHUT_WR)
        interim = client.recv(65536)
        assert interim.startswith(b"HTTP/1.1 100 ")
        app.go_on()
        rest = (interim + everything(client)).partition(b"\r\n\r\n")[2]
        assert rest.startswith(b"HTTP/1.1 200 ")
        assert rest.endswith(b"\r\n\r\ndone")
        assert app.left == []


def test_both_requests_of_a_client_that_then_closed_its_side_are_answered():
    app = Slow()
    with served(app) as running, connect(running.port, request() + request(path="/second")) as client:
        until(lambda: app.asked == ["/"])
        client.shutdown(socket.SHUT_WR)
        app.go_on()
        assert everything(client).count(b"\r\n\r\ndone") == 2


@pytest.mark.parametrize("later", [False, True])
def test_a_client_that_has_left_altogether_is_told_from_it_soon(later: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.apps.serve.connection.POLLS_PER_PROBE", 2 if later else 10**9)  # one probe is enough
    app = Slow()
    with served(app) as running:
        client = connect(running.port, request(path="/left"))
        until(lambda: app.asked == ["/left"])
        if later:
            client.shutdown(socket.SHUT_WR)
            assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
        client.close()
        until(lambda: app.left == ["/left"])
        until(lambda: not running.connections)


def test_in_the_older_protocol_without_interim_answers_it_has_left():
    app = Slow()
    with served(app) as running, connect(running.port, b"GET /old HTTP/1.0\r\nhost: localhost\r\n\r\n") as client:
        until(lambda: app.asked == ["/old"])
        client.shutdown(socket.SHUT_WR)
        assert everything(client) == b""
        until(lambda: app.left == ["/old"])


def test_the_standard_client_reads_past_the_interim_answer():
    import http.client

    app = Slow()
    with served(app) as running:
        asking = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        asking.request("GET", "/")
        until(lambda: app.asked == ["/"])
        asking.sock.shutdown(socket.SHUT_WR)
        time.sleep(0.1)  # for the interim answer to be on its way
        app.go_on()
        actual = asking.getresponse()
        assert (actual.status, actual.read()) == (200, b"done")
        asking.close()
