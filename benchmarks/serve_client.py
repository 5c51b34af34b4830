"""HTTP client that writes raw bytes to a server on loopback, and records the answer and its time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

PATIENCE = 240.0  # seconds for any request


@dataclass(frozen=True)
class Reply:
    """Complete answer of the server."""

    status: int  # 0 if the connection ended without an answer
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Read the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Mapping[str, Any]:
        """Error of OpenAI's shape; empty if the body has another shape."""
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
        """True if the stream is complete."""
        return self.body.rstrip().endswith(b"data: [DONE]")

    @property
    def text(self) -> str:
        """Text of a streamed chat."""
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
    """Open a connection, send data, and abort the connection at the end, in whatever state it is."""
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
    header = await reader.readuntil(b"\r\n\r\n")
    first, *lines = header.decode("latin-1").strip().split("\r\n")
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
    """Read the metrics of the server that have no labels."""
    lines = (await ask(port, "GET", "/metrics")).body.decode().splitlines()
    pairs = [line.split() for line in lines if line and line[0] != "#" and "{" not in line]
    return {name: float(value) for name, value in pairs}


async def until(port: int, **targets: float) -> Mapping[str, float]:
    """Poll the metrics until they have the wanted values; keys are the last words of their names."""
    async with asyncio.timeout(PATIENCE):
        while True:
            metrics = await measure(port)
            by_last_word = {name.rpartition("_")[2]: value for name, value in metrics.items()}
            if all(by_last_word[name] == value for name, value in targets.items()):
                return metrics
            await asyncio.sleep(0.005)
