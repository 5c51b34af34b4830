"""A client that writes bytes to a server on loopback, and sees what comes back and when."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

PATIENCE = 240.0  # seconds for anything


@dataclass(frozen=True)
class Reply:
    """An answer that was read to its end."""

    status: int  # 0 where the connection ended without any
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Read the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Mapping[str, Any]:
        """The error, which has the shape of OpenAI's; empty where it has not."""
        try:
            error = self.json()["error"]
        except (ValueError, KeyError, TypeError):
            return {}
        return error if error.keys() == {"message", "type", "param", "code"} else {}

    def events(self) -> list[Any]:
        """List the events of a stream, without `[DONE]`."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def done(self) -> bool:
        """True if the stream came to its end."""
        return self.body.rstrip().endswith(b"data: [DONE]")

    @property
    def text(self) -> str:
        """Text that a stream of a chat wrote."""
        choices = [event["choices"][0] for event in self.events() if event.get("choices")]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def request(method: str, path: str, body: object = None, **headers: str) -> bytes:
    """Encode the bytes of a request; `_` in the name of a header stands for a hyphen."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"host": "localhost", "connection": "close", "content_length": str(len(data)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + data


@asynccontextmanager
async def connection(port: int, data: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection, send data, and cut the connection at the end, whatever is going on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


async def send(port: int, data: bytes) -> Reply:
    """Send bytes, and read until the server closes."""
    start = time.perf_counter()
    try:
        async with connection(port, data) as (reader, _), asyncio.timeout(PATIENCE):
            return await read(reader, start)
    except ConnectionError:
        return Reply(0, {}, b"", time.perf_counter() - start)


async def read(reader: asyncio.StreamReader, start: float) -> Reply:
    """Read an answer to its end and join the chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()) or b"0", 16):
            body += (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    return Reply(int(first.split()[1]), headers, body, time.perf_counter() - start)


async def ask(port: int, method: str, path: str, body: object = None, **headers: str) -> Reply:
    """Send one request on a new connection."""
    return await send(port, request(method, path, body, **headers))


async def measure(port: int) -> Mapping[str, float]:
    """Read the counts of the server, without those that have labels."""
    lines = (await ask(port, "GET", "/metrics")).body.decode().splitlines()
    pairs = [line.split() for line in lines if line and line[0] != "#" and "{" not in line]
    return {name: float(value) for name, value in pairs}


async def until(port: int, **wanted: float) -> Mapping[str, float]:
    """Ask for the counts until they have the wanted values; the last word of a name stands for it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await measure(port)
            short = {name.rpartition("_")[2]: value for name, value in found.items()}
            if all(short[name] == value for name, value in wanted.items()):
                return found
            await asyncio.sleep(0.005)
