"""An application served on a port of its own in a thread, and clients that write what bytes they like."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 20.0  # seconds after which a test has failed


@contextmanager
def served(app: Callable[..., Any], *, host: str = "127.0.0.1", **options: Any) -> Iterator[Any]:
    """Serve an ASGI application while the body runs; gives the `Running`, with `port` and `thread` beside."""
    from llorch.apps.serve.server import bind, serve

    bound = bind(host, 0)
    started, found = threading.Event(), []

    def ready(running: Any) -> None:
        running.port, running.thread = bound.getsockname()[1], thread
        found.append(running)
        started.set()

    thread = threading.Thread(target=lambda: serve(app, bound, ready=ready, **options), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield found[0]
    finally:
        found[0].stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def connect(port: int, data: bytes = b"", *, read_buffer: int | None = None) -> socket.socket:
    """A connection on which something was sent."""
    client = socket.socket()
    client.settimeout(PATIENCE)
    if read_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
    client.connect(("127.0.0.1", port))
    client.sendall(data)
    return client


def request(method: str = "GET", path: str = "/", body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request; `_` in the name of a header stands for a hyphen."""
    fields = {"host": "localhost", **({"content_length": str(len(body))} if body else {}), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The next answer that has a length: status, headers and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(65536)
        if not more:
            raise ConnectionError(f"no answer, but {data!r}")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers.get("content-length", 0)):
        body += client.recv(65536)
    return int(first.split()[1]), headers, body


def ask(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request and its answer on a connection of their own."""
    with connect(port, data) as client:
        return answer(client)


def error_code(body: bytes) -> str:
    """The code of an error, which has the shape of OpenAI's."""
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    return error["code"]


def is_closed(client: socket.socket) -> bool:
    """Wait until nothing more comes; True where the other side has closed and not we got tired."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
