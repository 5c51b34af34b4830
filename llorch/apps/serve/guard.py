"""Checks of every request before it reaches a route.

    Host        a name of this server, else 403; this stops DNS rebinding
    Origin      none, llorch's own page, or an origin allowed by name, else 403
    key         if the server has a key: `Authorization` on every route except /health, else 401
    body        at most `max_body` bytes, else 413

The guard reads the whole body; the application gets it in one message.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Collection

from llorch.apps.serve.refusal import App, Message, Receive, Refusal, Scope, Send
from llorch.runtime.errors import UserError, printable

_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(:[0-9]*)?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
WITHOUT_KEY = frozenset({"/health"})  # paths
MAX_BODY = 4 * 2**20  # bytes of one body
MAX_BODIES = 64 * MAX_BODY  # bytes of the bodies of all running requests together
MAX_LOGGED = 100  # characters of a path
EXPOSED = b"x-request-id, x-llorch-ignored, retry-after"  # headers that pages of allowed origins may read
_SDK_HEADERS = ("arch", "async", "helper-method", "lang", "os", "package-version", "retry-count", "runtime",
            "runtime-version", "timeout")  # fmt: skip
ALLOWED = ", ".join(
    ("authorization", "content-type", "accept", "cache-control", "x-request-id", "x-requested-with",
     *(f"x-stainless-{name}" for name in _SDK_HEADERS))
).encode()  # fmt: skip
CLIENT_LEFT = 499  # status in the log if the client disconnected before the answer

FOREIGN_HOST = Refusal(
    403, "the Host header does not name this server; see --allow-host of llorch serve", "host_not_allowed"
)
FOREIGN_ORIGIN = Refusal(
    403, "this server does not answer pages of this origin; see --allow-origin of llorch serve", "origin_not_allowed"
)
BODY_TOO_LARGE = Refusal(413, "the body of the request is too large", "request_too_large")
BUSY = Refusal(503, "too many large requests at once", "too_many_bodies", {"retry-after": "1"})
_WRONG_KEY = "the API key is missing or wrong: expected a header 'Authorization: Bearer KEY'"
WRONG_KEY = Refusal(401, _WRONG_KEY, "invalid_api_key", {"www-authenticate": "Bearer"})
WRONG_KEY_OF_PAGE = Refusal(401, _WRONG_KEY, "invalid_api_key", {"www-authenticate": 'Basic realm="API key"'})


def require_key(listener: socket.socket, key: str | None) -> None:
    """Raise UserError if other machines can reach the address and there is no key, or if the key is unusable."""
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key or key == ""):
        raise UserError("serve: expected an API key of printable ASCII characters without spaces, got another text")
    host = listener.getsockname()[0]
    if key is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise UserError(f"serve: expected an API key (--api-key), got none; other machines can reach {host}")


class Guard:
    """ASGI application that checks requests before it calls another one."""

    def __init__(
        self,
        app: App,
        *,
        key: str | None = None,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        max_body: int = MAX_BODY,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Guard an application.

        Args:
            app: The application that answers accepted requests.
            key: The API key; None accepts every client.
            hosts: Names of the server, in addition to the loopback names and the address that a client reached.
            origins: Allowed origins of other pages, as a browser writes them, including `null`. These pages must send
                the key in a header: browsers may not send cookies or stored passwords to another origin.
            max_body: Maximum bytes of a request's body.
            log: Called with a line for each request: method, path, status and time, but no text and no key.
        """
        self._app, self._max_body, self._log = app, max_body, log
        self._key = None if key is None else _digest_key(key.encode())
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._n_body_bytes = 0  # bytes of the bodies of running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and answer a request, and log it."""
        start, status = time.perf_counter(), CLIENT_LEFT
        cors_headers = _cors_headers(self._allowed_origin(scope), bool(self._origins))

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *cors_headers]}
            await send(message)

        try:
            await self._answer(scope, receive, send_with_headers)
        finally:
            if self._log is not None:
                path = printable(scope["path"])[:MAX_LOGGED]
                self._log(f"{scope['method']} {path} {status} {1000 * (time.perf_counter() - start):.0f} ms")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request by its headers or body, or pass it to the application."""
        refusal = self._refuse_headers(scope)
        if refusal is not None:
            return await refusal.send_to(send, receive)
        if _is_preflight(scope):
            return await _answer_preflight(send)
        body = bytearray()
        try:
            refusal, is_unread = await self._read_body(body, receive)
            if refusal is not None:
                await refusal.send_to(send, receive if is_unread else None)
            elif not is_unread:
                await self._app(scope, _replay_body(body, receive), send)
        finally:
            self._n_body_bytes -= len(body)

    def _refuse_headers(self, scope: Scope) -> Refusal | None:
        """Return the refusal of a request by its headers; None if they are accepted."""
        headers = _collect_headers(scope)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._names_this_server(hosts[0], scope):
            return FOREIGN_HOST
        origins = headers.get(b"origin", [])
        allowed = self._allowed_origin(scope) is not None
        if not allowed and (_is_preflight(scope) or any(not self._is_own_page(origin, hosts[0]) for origin in origins)):
            return FOREIGN_ORIGIN
        if _is_preflight(scope):
            return None
        if self._key is not None and scope["path"] not in WITHOUT_KEY:
            if not self._has_key(headers.get(b"authorization", [])):
                return WRONG_KEY_OF_PAGE if b"text/html" in b"".join(headers.get(b"accept", [])) else WRONG_KEY
        length = headers.get(b"content-length", [b"0"])[0]
        return BODY_TOO_LARGE if int(length) > self._max_body else None

    def _names_this_server(self, host: bytes, scope: Scope) -> bool:
        """Tell if a `Host` header names this server."""
        name = _without_port(host.decode("latin-1").lower())
        reached = scope["server"][0].removeprefix("::ffff:") if scope.get("server") else ""  # IPv4 over IPv6
        return bool(name) and (name in LOOPBACK or name in self._hosts or name in (reached, f"[{reached}]"))

    def _is_own_page(self, origin: bytes, host: bytes) -> bool:
        """Tell if an `Origin` header names this server's own page."""
        scheme, _, address = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return address == host.decode("latin-1").lower() or _without_port(address) in self._hosts

    def _allowed_origin(self, scope: Scope) -> bytes | None:
        """Return the origin of a request if it is one of the allowed origins; else None."""
        origins = _collect_headers(scope).get(b"origin", [])
        return origins[0] if len(origins) == 1 and origins[0] in self._origins else None

    def _has_key(self, values: list[bytes]) -> bool:
        """Tell if `Authorization` has the key, as a bearer token or as the password or user name of Basic."""
        if len(values) != 1 or self._key is None:
            return False
        scheme, _, credentials = values[0].partition(b" ")
        if scheme.lower() == b"basic":
            try:
                name, _, password = base64.b64decode(credentials).partition(b":")
            except binascii.Error:
                return False
            candidates = [name, password]
        elif scheme.lower() == b"bearer":
            candidates = [credentials]
        else:
            return False
        # a list, not a generator: every candidate is compared, so the time does not tell which one matches
        return any([hmac.compare_digest(_digest_key(key.strip()), self._key) for key in candidates])

    async def _read_body(self, body: bytearray, receive: Receive) -> tuple[Refusal | None, bool]:
        """Read the request into `body`; return a refusal or None, and True if a part of the body is missing."""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None, True
            chunk, has_more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(chunk) > self._max_body:
                return BODY_TOO_LARGE, has_more
            if self._n_body_bytes + len(chunk) > MAX_BODIES:
                return BUSY, has_more
            body += chunk
            self._n_body_bytes += len(chunk)
            if not has_more:
                return None, False


def _digest_key(key: bytes) -> bytes:
    """Hash a key to a fixed length, so that every comparison takes the same time."""
    return hashlib.sha256(key).digest()


def _without_port(host: str) -> str:
    """Return a host's name without its port; empty if there is no name or no valid port."""
    match = _HOST.fullmatch(host)
    return match[1] if match else ""


def _collect_headers(scope: Scope) -> dict[bytes, list[bytes]]:
    """Collect the values of each header by its name."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, []).append(value)
    return headers


def _is_preflight(scope: Scope) -> bool:
    """Tell if a request is a browser's CORS preflight request, which has no key."""
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in _collect_headers(scope)


def _cors_headers(origin: bytes | None, varies: bool) -> list[tuple[bytes, bytes]]:
    """Make the CORS headers that let a page of this origin read an answer; `varies`: answers depend on the origin."""
    vary = [(b"vary", b"origin")] if varies else []
    if origin is None:
        return vary
    return [*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]


async def _answer_preflight(send: Send) -> None:
    """Answer a CORS preflight request."""
    fields = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", ALLOWED),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": fields})
    await send({"type": "http.response.body", "body": b""})


def _replay_body(body: bytearray, receive: Receive) -> Receive:
    """Make a receive function that returns the read body first, then messages of the connection."""
    is_delivered = False

    async def receive_body() -> Message:
        nonlocal is_delivered
        if is_delivered:
            return await receive()
        is_delivered = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return receive_body
