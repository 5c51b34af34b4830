"""Who may ask, and how much: what is checked before a request reaches any route.

    Host        a name of ours, else 403: a page elsewhere whose name was bound to our address is not answered
    Origin      that of our own page, else 403; nothing is ever allowed across origins
    key         with a key, `Authorization` on every route but /health, else 401
    body        at most `max_body` bytes, else 413

A body is read here, whole; the application finds it complete.
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
from typing import Any

from llorch.errors import printable
from llorch.serve.refusal import App, Message, Receive, Refusal, Send

_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(:[0-9]*)?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
WITHOUT_KEY = frozenset({"/health"})
MAX_BODY = 4 * 2**20  # bytes
MAX_BODIES = 64 * MAX_BODY  # of all requests that are under way
LOGGED = 100  # characters of a path
CLIENT_LEFT = 499  # what the log says where nobody waited for an answer

FOREIGN_HOST = Refusal(403, "the Host of the request is none of this server's; see --allow-host", "host_not_allowed")
FOREIGN_ORIGIN = Refusal(403, "pages of other origins are not answered", "origin_not_allowed")
BODY_TOO_LARGE = Refusal(413, "the body of the request is too large", "request_too_large")
BUSY = Refusal(503, "too many large requests at once", "too_many_bodies", {"retry-after": "1"})
_WRONG_KEY = "the API key is missing or wrong: expected a header 'Authorization: Bearer KEY'"
WRONG_KEY = Refusal(401, _WRONG_KEY, "invalid_api_key", {"www-authenticate": "Bearer"})
WRONG_KEY_OF_PAGE = Refusal(401, _WRONG_KEY, "invalid_api_key", {"www-authenticate": 'Basic realm="API key"'})


def require_key(bound: socket.socket, key: str | None) -> None:
    """ValueError where others than this machine could reach an address without a key, or the key cannot be sent."""
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key or key == ""):
        raise ValueError("serve: expected an API key of printable ASCII characters without blanks")
    host = bound.getsockname()[0]
    if key is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise ValueError(f"serve: {host} can be reached from elsewhere: expected an API key (--api-key), got none")


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: App,
        *,
        key: str | None = None,
        hosts: Collection[str] = (),
        max_body: int = MAX_BODY,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Guard an application.

        Args:
            app: What answers the requests that pass.
            key: What a client has to know; None lets everybody in.
            hosts: Names of the server, beside those of loopback and the address that a client reached.
            max_body: Bytes of a request's body.
            log: Gets a line for each request, if there is one: method, path, status, time; nothing of its text or key.
        """
        self._app, self._max_body, self._log = app, max_body, log
        self._key = None if key is None else _digest(key.encode())
        self._hosts = frozenset(host.lower() for host in hosts)
        self._n_held = 0  # bytes of bodies under way

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a request."""
        start, status = time.perf_counter(), CLIENT_LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        finally:
            if self._log is not None:
                path = printable(scope["path"])[:LOGGED]
                self._log(f"{scope['method']} {path} {status} {1000 * (time.perf_counter() - start):.0f} ms")

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        refusal = self._refuse_headers(scope)
        if refusal is not None:
            return await refusal.say(send, receive)
        body = bytearray()
        try:
            refusal, rest = await self._read(body, receive)
            if refusal is not None:
                await refusal.say(send, receive if rest else None)
            elif not rest:
                await self._app(scope, _after(body, receive), send)
        finally:
            self._n_held -= len(body)

    def _refuse_headers(self, scope: Any) -> Refusal | None:
        """What the line and the headers alone are refused for."""
        of_name: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            of_name.setdefault(name, []).append(value)
        hosts = of_name.get(b"host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0], scope):
            return FOREIGN_HOST
        origins = of_name.get(b"origin", [])
        if any(not self._is_own_page(origin, hosts[0]) for origin in origins) or _is_preflight(scope, of_name):
            return FOREIGN_ORIGIN
        if self._key is not None and scope["path"] not in WITHOUT_KEY:
            if not self._knows_key(of_name.get(b"authorization", [])):
                return WRONG_KEY_OF_PAGE if b"text/html" in b"".join(of_name.get(b"accept", [])) else WRONG_KEY
        length = of_name.get(b"content-length", [b"0"])[0]
        return BODY_TOO_LARGE if int(length) > self._max_body else None

    def _is_ours(self, host: bytes, scope: Any) -> bool:
        """Whether a `Host` header names this server."""
        name = _without_port(host.decode("latin-1").lower())
        reached = scope["server"][0].removeprefix("::ffff:") if scope.get("server") else ""
        return bool(name) and (name in LOOPBACK or name in self._hosts or name in (reached, f"[{reached}]"))

    def _is_own_page(self, origin: bytes, host: bytes) -> bool:
        """Whether an `Origin` header is that of the page that this server serves."""
        scheme, _, where = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return where == host.decode("latin-1").lower() or _without_port(where) in self._hosts

    def _knows_key(self, given: list[bytes]) -> bool:
        """Whether `Authorization` has the key; as the password of any name it comes from a browser."""
        if len(given) != 1 or self._key is None:
            return False
        scheme, _, credentials = given[0].partition(b" ")
        if scheme.lower() == b"basic":
            try:
                credentials = base64.b64decode(credentials).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(_digest(credentials.strip()), self._key)

    async def _read(self, body: bytearray, receive: Receive) -> tuple[Refusal | None, bool]:
        """Read into `body`: what it is refused for, and whether a rest of it was not read, or never came."""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None, True
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(chunk) > self._max_body:
                return BODY_TOO_LARGE, more
            if self._n_held + len(chunk) > MAX_BODIES:
                return BUSY, more
            body += chunk
            self._n_held += len(chunk)
            if not more:
                return None, False


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing takes one time."""
    return hashlib.sha256(key).digest()


def _without_port(host: str) -> str:
    """A host's name; empty where it has none, or what follows is no port."""
    found = _HOST.fullmatch(host)
    return found[1] if found else ""


def _is_preflight(scope: Any, of_name: dict[bytes, list[bytes]]) -> bool:
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in of_name


def _after(body: bytearray, receive: Receive) -> Receive:
    """Give the body first, then what comes of the connection."""
    given = False

    async def receive_body() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return receive_body
