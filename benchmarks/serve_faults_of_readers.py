"""Faults of clients that do not read their streams."""

import asyncio
import socket
import time
from contextlib import ExitStack

from serve_client import request, until
from serve_faults_of_clients import CHAT, Verdict, chat
from serve_faults_of_work import share, solo, stream
from serve_processes import Server

UNREAD = 2
DROPPED = 30.0  # seconds without reading before the server drops a client
_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}  # no answer ends before max_tokens
_FORM = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _NUMBERS}}
LARGE = {"n": 8, "max_tokens": 450, "logprobs": True, "top_logprobs": 20, "stream": True, "response_format": _FORM}


async def unread(server: Server) -> Verdict:
    """Ask for streams of 6 MB, more than the system takes, and read no byte."""
    expected = await solo(server)
    bytes_before, n_files = server.resident(), await _open_files(server)
    start = time.perf_counter()
    with ExitStack() as stack:
        for _ in range(UNREAD):
            stack.enter_context(_silent(server.port, chat(seed=1, **LARGE)))
        await until(server.port, running=4)
        equal = share(await asyncio.gather(*(stream(server.port, index) for index in range(3))), expected)
        await until(server.port, running=0, waiting=0)
        freed, n_open = time.perf_counter() - start, await _open_files(server) - n_files
        while (open_now := server.open_files() - n_files) > 0 and time.perf_counter() - start < freed + 2 * DROPPED:
            await asyncio.sleep(0.1)
    dropped, grown = time.perf_counter() - start, server.resident() - bytes_before
    text = (
        f"{equal} of 3 others as alone; slots back at {freed:.0f} s; "
        f"{n_open} dropped at {dropped:.0f} s; {grown:+.1f} MB"
    )
    is_dropped = n_open == UNREAD or freed > DROPPED  # slow answers: the first client is dropped before all have ended
    is_right = equal == 3 and is_dropped and open_now <= 0 and grown < 50
    return Verdict(is_right, text, dropped < freed + DROPPED + 3)


async def _open_files(server: Server) -> int:
    """Count the open files after the connections of clients that have read everything are closed."""
    await asyncio.sleep(1)
    return server.open_files()


def _silent(port: int, body: object) -> socket.socket:
    """Open a connection that sends a request and reads little of the answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request("POST", CHAT, body))
    return client
