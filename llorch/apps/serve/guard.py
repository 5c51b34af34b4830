"""Who may ask, and how much: what is checked before a request reaches any route.

    Host        a name of this server, else 403: a page elsewhere whose name was bound to its address is not answered
    Origin      that of our own page, or one that was allowed by name, else 403
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

from llorch.apps.serve.refusal import App, Message, Receive, Refusal, Scope, Send
from llorch.runtime.errors import UserError, printable

_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(:[0-9]*)?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
WITHOUT_KEY = frozenset({"/health"})
MAX_BODY = 4 * 2**20  # bytes
MAX_BODIES = 64 * MAX_BODY  # of all requests that are under way
LOGGED = 100  # characters of a path
EXPOSED = b"x-request-id, x-llorch-ignored, retry-after"
_OF_SDKS = ("arch", "async", "helper-method", "lang", "os", "package-version", "retry-count", "runtime",
            "runtime-version", "timeout")  # fmt: skip
ALLOWED = ", ".join(
    ("authorization", "content-type", "accept", "cache-control", "x-request-id", "x-requested-with",
     *(f"x-stainless-{name}" for name in _OF_SDKS))
).encode()  # fmt: skip
CLIENT_LEFT = 499  # what the log says where nobody waited for an answer

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


def require_key(bound: socket.socket, key: str | None) -> None:
    """Raise ValueError if other machines could reach an address without a key, or if the key cannot be sent."""
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key or key == ""):
        raise UserError("serve: expected an API key of printable ASCII characters without spaces, got another text")
    host = bound.getsockname()[0]
    if key is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise UserError(f"serve: expected an API key (--api-key), got none; other machines can reach {host}")


class Guard:
    """An ASGI application around another one."""

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
            app: What answers the requests that pass.
            key: What a client has to know; None lets everybody in.
            hosts: Names of the server, beside those of loopback and the address that a client reached.
            origins: Pages of other origins that may ask, each as a browser names it, `null` included. They send the key
                in a header, if there is one: no cookie or password that a browser keeps is allowed across origins.
            max_body: Bytes of a request's body.
            log: Gets a line for each request, if there is one: method, path, status, time; nothing of its text or key.
        """
        self._app, self._max_body, self._log = app, max_body, log
        self._key = None if key is None else _digest_of_key(key.encode())
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._n_held = 0  # bytes of bodies under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        start, status = time.perf_counter(), CLIENT_LEFT
        allowed = _allowing(self._allowed_origin(scope), bool(self._origins))

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        finally:
            if self._log is not None:
                path = printable(scope["path"])[:LOGGED]
                self._log(f"{scope['method']} {path} {status} {1000 * (time.perf_counter() - start):.0f} ms")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request by its headers or body, or pass it on to the app."""
        refusal = self._refuse_headers(scope)
        if refusal is not None:
            return await refusal.say(send, receive)
        if _is_preflight(scope):
            return await _let_ask(send)
        body = bytearray()
        try:
            refusal, rest = await self._read(body, receive)
            if refusal is not None:
                await refusal.say(send, receive if rest else None)
            elif not rest:
                await self._app(scope, _after(body, receive), send)
        finally:
            self._n_held -= len(body)

    def _refuse_headers(self, scope: Scope) -> Refusal | None:
        """Refuse a request for its line or its headers alone."""
        of_name = _by_name(scope)
        hosts = of_name.get(b"host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0], scope):
            return FOREIGN_HOST
        origins = of_name.get(b"origin", [])
        allowed = self._allowed_origin(scope) is not None
        if not allowed and (_is_preflight(scope) or any(not self._is_own_page(each, hosts[0]) for each in origins)):
            return FOREIGN_ORIGIN
        if _is_preflight(scope):
            return None
        if self._key is not None and scope["path"] not in WITHOUT_KEY:
            if not self._knows_key(of_name.get(b"authorization", [])):
                return WRONG_KEY_OF_PAGE if b"text/html" in b"".join(of_name.get(b"accept", [])) else WRONG_KEY
        length = of_name.get(b"content-length", [b"0"])[0]
        return BODY_TOO_LARGE if int(length) > self._max_body else None

    def _is_ours(self, host: bytes, scope: Scope) -> bool:
        """Tell if a `Host` header names this server."""
        name = _without_port(host.decode("latin-1").lower())
        reached = scope["server"][0].removeprefix("::ffff:") if scope.get("server") else ""
        return bool(name) and (name in LOOPBACK or name in self._hosts or name in (reached, f"[{reached}]"))

    def _is_own_page(self, origin: bytes, host: bytes) -> bool:
        """Tell if an `Origin` header is that of the page that this server serves."""
        scheme, _, where = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return where == host.decode("latin-1").lower() or _without_port(where) in self._hosts

    def _allowed_origin(self, scope: Scope) -> bytes | None:
        """Return the origin of a request, if this other origin is allowed."""
        origins = _by_name(scope).get(b"origin", [])
        return origins[0] if len(origins) == 1 and origins[0] in self._origins else None

    def _knows_key(self, given: list[bytes]) -> bool:
        """Tell if `Authorization` has the key: as a bearer token, or as the password or the user name of Basic."""
        if len(given) != 1 or self._key is None:
            return False
        scheme, _, credentials = given[0].partition(b" ")
        if scheme.lower() == b"basic":
            try:
                name, _, password = base64.b64decode(credentials).partition(b":")
            except binascii.Error:
                return False
            tried = [name, password]
        elif scheme.lower() == b"bearer":
            tried = [credentials]
        else:
            return False
        # a list: all in one time
        return any([hmac.compare_digest(_digest_of_key(key.strip()), self._key) for key in tried])

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


def _digest_of_key(key: bytes) -> bytes:
    """Hash a key to a fixed length, so that every comparison takes the same time."""
    return hashlib.sha256(key).digest()


def _without_port(host: str) -> str:
    """Return a host's name without its port; empty if there is no name or no valid port."""
    found = _HOST.fullmatch(host)
    return found[1] if found else ""


def _by_name(scope: Scope) -> dict[bytes, list[bytes]]:
    """Collect the values of each header."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name, []).append(value)
    return found


def _is_preflight(scope: Scope) -> bool:
    """Tell if this is the preflight request of a browser, which carries no key."""
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in _by_name(scope)


def _allowing(origin: bytes | None, varies: bool) -> list[tuple[bytes, bytes]]:
    """Make the headers that let a page of this origin read an answer; `varies` makes caches depend on the origin."""
    vary = [(b"vary", b"origin")] if varies else []
    if origin is None:
        return vary
    return [*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]


async def _let_ask(send: Send) -> None:
    """Answer a preflight."""
    fields = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", ALLOWED),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": fields})
    await send({"type": "http.response.body", "body": b""})


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
