"""`x-request-id`: a name for each request, that of the client if it sent one, in every answer and refusal."""

import re
import secrets
from collections.abc import Iterable
from typing import Any

from llorch.apps.serve.refusal import App, Message, Receive, Send

HEADER = b"x-request-id"
_GOOD = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")  # nothing that ends a header, a line of a log or a quotation


def request_id(headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the id that a client gave to its request; a new one if it gave none, several or an invalid one."""
    given = [value for name, value in headers if name == HEADER]
    if len(given) == 1 and _GOOD.fullmatch(given[0]):
        return given[0]
    return f"req_{secrets.token_hex(12)}".encode()


def identified(app: App) -> App:
    """Wrap an application so that every answer has the id of its request."""

    async def named(scope: Any, receive: Receive, send: Send) -> None:
        name = request_id(scope["headers"])

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, name)]}
            await send(message)

        await app(scope, receive, naming)

    return named
