"""Faults of clients, as bytes: incomplete requests, huge ones, foreign names, wrong keys."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from serve_client import Reply, ask, connection, read, request, send
from serve_processes import Server

MARK = "xylophone-4711"  # in prompts; must not be in the log
KEY = "sk-Sh1eld-key-0815"
CHAT = "/v1/chat/completions"


class Verdict(NamedTuple):
    """Verdict on behaviour, and separately on time, because time depends on the load of the machine."""

    right: bool
    measured: str
    in_time: bool = True


def chat(content: str = "Once upon a time", **fields: object) -> dict[str, object]:
    """Make the body of a chat, as short as it can be."""
    return {"model": "story", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def worst(replies: Sequence[Reply]) -> float:
    """Return the time below which 99 % of the answers came, in milliseconds."""
    seconds = sorted(reply.seconds for reply in replies)
    return 1000 * seconds[int(0.99 * (len(seconds) - 1))]


async def half_open(server: Server) -> Verdict:
    """Open 1,000 connections that begin a request and send no more."""
    bytes_before, ended = server.resident(), []

    async def half() -> None:
        start = time.perf_counter()
        async with connection(server.port, b"GET /health HT") as (reader, _):
            reply = await read(reader, start)
            await reader.read()
            ended.append((reply.status, time.perf_counter() - start))

    waiting = [asyncio.create_task(half()) for _ in range(1000)]
    await asyncio.sleep(2)  # all have connected
    good = [await ask(server.port, "GET", "/health") for _ in range(100)]
    growth = server.resident() - bytes_before
    await asyncio.gather(*waiting)
    last = max(seconds for _, seconds in ended)
    right = all(status == 408 for status, _ in ended) and all(reply.status == 200 for reply in good) and growth < 20
    text = f"{sum(status == 408 for status, _ in ended)} x 408, last after {last:.1f} s; good p99 {worst(good):.0f} ms"
    return Verdict(right, f"{text}; {growth:+.1f} MB", last <= 12 and worst(good) < 100)


async def huge(server: Server) -> Verdict:
    """Send a body of 400 MB, chunks past the limit, long headers, two lengths."""
    bytes_before, n_bytes = server.resident(), 400 * 2**20
    actual = {"400 MB": (await push(server, n_bytes, request("POST", CHAT, content_length=str(n_bytes)))).status}
    chunked = request("POST", CHAT, transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
    actual["chunks"] = (await push(server, n_bytes, chunked, chunked=True)).status
    growth = server.resident() - bytes_before
    actual["headers"] = (await ask(server.port, "GET", "/health", x="y" * 100_000)).status
    actual["CL+TE"] = (await ask(server.port, "POST", CHAT, b"0\r\n\r\n", transfer_encoding="chunked")).status
    is_right = actual == {"400 MB": 413, "chunks": 413, "headers": 431, "CL+TE": 400}
    statuses = ", ".join(f"{name} {status}" for name, status in actual.items())
    return Verdict(is_right and growth < 10, f"{statuses}; {growth:+.1f} MB")


async def push(server: Server, n_bytes: int, header: bytes, *, chunked: bool = False) -> Reply:
    """Send a large body until there is an answer."""
    piece = b"x" * 2**16
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece
    async with connection(server.port, header) as (reader, writer):
        answer = asyncio.create_task(read(reader, time.perf_counter()))
        for _ in range(n_bytes // len(piece)):
            if answer.done() or writer.is_closing():
                break
            writer.write(chunk)
            await writer.drain()
        return await answer


async def without_end(server: Server) -> Verdict:
    """Send a body that stops before its end, with a length and in chunks."""
    headers = (
        request("POST", CHAT, content_length="100") + b"{",
        request("POST", CHAT, transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"") + b"1\r\n{\r\n",
    )
    replies = await asyncio.gather(*(send(server.port, head) for head in headers))
    text = ", ".join(f"{reply.status} after {reply.seconds:.1f} s" for reply in replies)
    is_right, in_time = all(reply.status == 408 for reply in replies), all(reply.seconds < 32 for reply in replies)
    return Verdict(is_right, text, in_time)


async def keys(server: Server) -> Verdict:
    """Send no key, a wrong one, one that is not ASCII, a part of the key; on routes that exist and that do not."""
    wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer \u00e9\u00ff"},
             {"authorization": f"Bearer {KEY[:-1]}"})  # fmt: skip
    paths = ("/v1/models", CHAT, "/metrics", "/docs", "/openapi.json", "/", "/no/such/route", "/health/")
    replies = [await ask(server.port, "GET", path, **headers) for path in paths for headers in wrong]
    accepted = await ask(server.port, "GET", "/v1/models", authorization=f"Bearer {KEY}")
    health = await ask(server.port, "GET", "/health")
    refused = sum(reply.status == 401 and reply.error.get("code") == "invalid_api_key" for reply in replies)
    is_right = refused == len(replies) and (accepted.status, health.status) == (200, 200)
    text = f"{refused} of {len(replies)} refused; with the key {accepted.status}, /health {health.status}"
    return Verdict(is_right, text)


async def names(server: Server) -> Verdict:
    """Send names of hosts, origins and models that the server does not have."""
    hosts = ("", ":11434", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "user@localhost")
    origins = ("null", "http://evil.example", "http://localhost:1", "http://localhost.evil.example")
    foreign = [await ask(server.port, "GET", "/v1/models", host=host) for host in hosts]
    foreign += [await ask(server.port, "POST", CHAT, chat(), origin=origin) for origin in origins]
    foreign.append(await ask(server.port, "OPTIONS", CHAT, origin="http://x", access_control_request_method="POST"))
    models = ("../x", "/etc/passwd", "story\0", "x" * 100_000, "", "story:", "story:../x", "STORY", "story\n")
    unknown = [await ask(server.port, "POST", CHAT, chat() | {"model": name}) for name in models]
    statuses = [reply.status for reply in foreign], [reply.status for reply in unknown]
    cors = [name for reply in foreign for name in reply.headers if name.startswith("access-control")]
    is_right = set(statuses[0]) == {403} and set(statuses[1]) == {404} and not cors
    return Verdict(is_right, f"hosts and origins {statuses[0]}; models {statuses[1]}")


async def log(server: Server) -> Verdict:
    """Send prompts, keys and line ends in requests; none of them may be in the log."""
    key = {"authorization": f"Bearer {KEY}"}
    await ask(server.port, "POST", CHAT, chat(MARK), **key)
    await ask(server.port, "POST", CHAT, chat(MARK, stream=True), **key)
    await ask(server.port, "POST", CHAT, chat(MARK, max_tokens=MARK), **key)
    await ask(server.port, "POST", CHAT, MARK.encode(), **key)
    await ask(server.port, "POST", f"/v1/{KEY[:2]}?prompt={MARK}", chat(), **key)
    await ask(server.port, "GET", "/a%0aFAKE%20LINE", authorization=f"Bearer {KEY[:-1]}x")
    server.stop()
    log_text = "".join(server.stderr_lines)
    leaks = [word for word in (MARK, KEY[3:9], KEY[-4:], "\nFAKE") if word in log_text]
    text = f"{len(server.stderr_lines)} lines, of what is secret: {leaks or 'nothing'}"
    return Verdict(not leaks and "/a\\nFAKE" in log_text, text)


async def bad_fields(server: Server) -> Verdict:
    """Send numbers out of range, wrong types, fields that would change the meaning."""
    bad: dict[str, object] = {
        "n": 9, "max_tokens": 0, "temperature": -1, "top_p": 1.5, "top_logprobs": 21, "seed": -2, "stop": [""] * 17,
        "logit_bias": {"5": 1}, "presence_penalty": "1", "frequency_penalty": 3, "top_k": -2, "min_p": 2,
        "stream": "yes", "messages": [], "chat_template": "{{ 1 }}", "chat_template_kwargs": [1], "tools": [{}],
    }  # fmt: skip
    n_named = 0
    for field, value in bad.items():
        reply = await ask(server.port, "POST", CHAT, chat() | {"logprobs": True, field: value})
        n_named += reply.status == 400 and (reply.error.get("param") or "").partition(".")[0] == field
    broken = (b"", b"{", b"[]", b"nul", b'{"model": NaN}', b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}')
    replies = [await ask(server.port, "POST", CHAT, body) for body in broken]
    refused = sum(reply.status == 400 and bool(reply.error) for reply in replies)
    right = n_named == len(bad) and refused == len(broken)
    return Verdict(right, f"{n_named} of {len(bad)} fields named, {refused} of {len(broken)} broken bodies refused")


async def long_texts(server: Server) -> Verdict:
    """Send prompts that fit no context; other requests continue meanwhile."""
    too_long = await ask(server.port, "POST", CHAT, chat("a b" * 400_000))
    patterns = (" ", "\n", "a", "1", "!", "aA", "\u00e9", "\U0001f600", "<", "ab ", "\t ", "0a")
    health: list[Reply] = []

    async def healthy() -> None:
        while True:
            health.append(await ask(server.port, "GET", "/health"))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(healthy())
    replies = [
        await ask(server.port, "POST", CHAT, chat(text * (1_000_000 // len(text.encode())))) for text in patterns
    ]
    watching.cancel()
    codes = {reply.error.get("code") for reply in (too_long, *replies)}
    slowest = max(reply.seconds for reply in replies)
    median = statistics.median(reply.seconds for reply in replies)
    text = f"{codes}; 1 MB in {median:.2f} s, at most {slowest:.2f} s; /health p99 {worst(health):.0f} ms"
    is_right = codes == {"context_length_exceeded"} and all(reply.status == 200 for reply in health)
    return Verdict(is_right, text, slowest < 3 and worst(health) < 250)
