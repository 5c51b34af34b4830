"""Refusals of requests before they reach a route, and request ids.

A refusal is a status and an error in OpenAI's format. Every answer and refusal has the header `x-request-id`; its value
is the id that the client sent, if it sent a valid one.
"""

import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

Scope = Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]  # as ASGI defines it


@dataclass(frozen=True)
class Refusal:
    """Answer to a request that llorch refuses."""

    status: int
    message: str
    code: str  # for programs
    headers: Mapping[str, str] | None = None  # in addition to those of every refusal

    def body(self) -> bytes:
        """Encode the error as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return json.dumps({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}).encode()

    def fields(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer."""
        headers = {"content-type": "application/json", "content-length": str(len(self.body())), **(self.headers or {})}
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def reason(self) -> bytes:
        """Return the HTTP name of the status."""
        return HTTPStatus(self.status).phrase.encode()

    async def send_to(self, send: Send, receive: Receive | None = None) -> None:
        """Send the answer, then `receive` the rest of the body: a client may read no answer if its sending fails."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.fields()})
        await send({"type": "http.response.body", "body": self.body(), "more_body": True})
        while receive is not None and (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.body", "body": b""})


HEADERS_TOO_SLOW = Refusal(408, "the headers of the request did not arrive in time", "request_timeout")
BODY_TOO_SLOW = Refusal(408, "the body of the request did not arrive in time", "request_timeout")
HEADERS_TOO_LARGE = Refusal(431, "the headers of the request are too long", "headers_too_large")
MALFORMED = Refusal(400, "expected an HTTP/1.1 request", "malformed_request")
FULL = Refusal(503, "too many connections", "too_many_connections", {"retry-after": "1"})
STOPPING = Refusal(503, "the server is stopping", "stopping", {"retry-after": "5", "connection": "close"})

HEADER = b"x-request-id"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")  # nothing that ends a header, a log line or a quotation


def request_id(headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the id that the client sent; a new id if it sent none, several or an invalid one."""
    ids = [value for name, value in headers if name == HEADER]
    if len(ids) == 1 and _SAFE_ID.fullmatch(ids[0]):
        return ids[0]
    return f"req_{secrets.token_hex(12)}".encode()


def add_request_id(app: App) -> App:
    """Wrap an application so that every answer has the id of its request in a header."""

    async def app_with_id(scope: Scope, receive: Receive, send: Send) -> None:
        client_id = request_id(scope["headers"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, client_id)]}
            await send(message)

        await app(scope, receive, send_with_id)

    return app_with_id
