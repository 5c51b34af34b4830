"""One connection: uvicorn's HTTP/1.1, with an end to everything that a client can let it wait for.

    headers    the line and the headers of a request come within `header_seconds`, else 408, and are short, else 431
    body       the body comes within `body_seconds` of them, else 408; one length, or chunks, else 400
    answer     somebody reads it: a connection that took no byte for `unread_seconds` is dropped
    between    after `idle_seconds` without another request it is closed

A client may close its own side once it has asked (`nc -N`). One that has left altogether looks the same at first: an
interim answer, `100 Continue`, makes its system say so. That is possible before an answer has begun, in HTTP/1.1; later
the end of what a client sends is the end of the connection, so that a stream that nobody reads gives its place back.

Where `connections` are open, the one that has waited longest for a client makes room for the next.
"""

import asyncio
import socket
import sys
from dataclasses import dataclass
from typing import Any, Literal

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from llorch.apps.serve.refusal import (
    BODY_TOO_SLOW,
    FULL,
    HEADER,
    HEADERS_TOO_LARGE,
    HEADERS_TOO_SLOW,
    MALFORMED,
    Refusal,
    request_id,
)

Awaited = Literal["headers", "body", "another", "nothing"]  # of the client; nothing: an answer is being made

LEAVING_SECONDS = 2.0  # for a client to close after it was refused
LOOK_SECONDS = 0.05  # between looks for a client that has closed its side
LOOKS_OF_A_PROBE = 20  # a client may leave later, too


@dataclass(frozen=True)
class ClientLimits:
    """What a client may take, of time in seconds."""

    header_seconds: float = 10.0
    body_seconds: float = 30.0
    unread_seconds: float = 30.0
    idle_seconds: float = 30.0
    grace_seconds: float = 30.0  # for running answers, once the server is asked to stop
    header_bytes: int = 16384
    connections: int = 2048


class StrictParser(h11.Connection):
    """Also refuses what h11 lets pass: a body of two lengths, and long headers that came at once."""

    def __init__(self, header_bytes: int) -> None:
        """Parse as a server, with a limit on the bytes of a header."""
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes

    def next_event(self) -> Any:
        """See h11; a request that is refused leaves as h11's own refusals do."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = [name for name, _ in event.headers]
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise self._refused("expected one length of the body, got two", 400)
            if len(event.target) + sum(len(name) + len(value) for name, value in event.headers) > self._header_bytes:
                raise self._refused("long headers", 431)
        return event

    def _refused(self, why: str, status: int) -> h11.RemoteProtocolError:
        """Let the parser fail, and return the error with its status."""
        self._process_error(self.their_role)
        return h11.RemoteProtocolError(why, error_status_hint=status)


class Connection(H11Protocol):
    """One client; see the module."""

    def __init__(self, config: Config, state: ServerState, limits: ClientLimits) -> None:
        """Serve one connection; `state` has the open connections of the server."""
        super().__init__(config, state, {})
        self.limits = limits
        self.conn = StrictParser(limits.header_bytes)
        self.awaited: Awaited = "nothing"
        self.since = 0.0  # the time at which it began to wait for that
        self._deadline: asyncio.TimerHandle | None = None
        self._leaving = False
        self._unread: asyncio.TimerHandle | None = None
        self._ended = False  # the client sends nothing more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, if there is room."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that all that nobody reads is seen
        self._wait_for("headers")
        if len(self.connections) > self.limits.connections and not self._take_the_place_of_another():
            self._refuse(FULL)

    def data_received(self, data: bytes) -> None:
        """Take up what comes, unless all was said."""
        if not self._leaving:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override] (uvicorn closes whatever is open)
        """Answer a client that only listens from now on; False, which closes, where it cannot be told from one gone."""
        self._ended = self._is_being_made() and self.scope["http_version"] == "1.1"
        if self._ended:
            self._look_for_it()
        return self._ended

    def on_response_complete(self) -> None:
        """Close where there is no more to answer."""
        super().on_response_complete()
        if self._ended and not self._is_being_made():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every wait of the connection."""
        self._wait_for("nothing")
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take up what has come, and see what has yet to come."""
        super().handle_events()
        self._wait_for(self._missing())

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not read."""
        error = sys.exception()
        too_large = getattr(error, "error_status_hint", 400) == 431
        self._refuse(HEADERS_TOO_LARGE if too_large else MALFORMED)

    def pause_writing(self) -> None:
        """Stop writing until the client reads on; drop the connection if it does not."""
        super().pause_writing()
        self._see_it_read(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """Note that the client has read what was sent."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _is_being_made(self) -> bool:
        """Tell if a whole request waits for the beginning of its answer."""
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.our_state is h11.SEND_RESPONSE
            and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        )

    def _look_for_it(self, n_looks: int = 0) -> None:
        """Drop a client that has left, which its system says when something was sent there."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if n_looks % LOOKS_OF_A_PROBE == 0 and self._is_being_made():
            probe = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(probe) or b"")
        self.loop.call_later(LOOK_SECONDS, self._look_for_it, n_looks + 1)

    def _missing(self) -> Awaited:
        """Name the part of a request that the client still has to send."""
        if self.transport.is_closing() or h11.ERROR in (self.conn.our_state, self.conn.their_state):
            return "nothing"
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.conn.their_state is h11.IDLE:
            return "headers" if self.cycle is None or self.conn.trailing_data[0] else "another"
        return "nothing"

    def _wait_for(self, awaited: Awaited) -> None:
        """Set a deadline, where it has none yet."""
        if awaited == self.awaited:
            return
        self.awaited, self.since = awaited, self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
        limits = self.limits
        seconds = {"headers": limits.header_seconds, "body": limits.body_seconds, "another": limits.idle_seconds}
        if awaited != "nothing":
            self._deadline = self.loop.call_later(seconds[awaited], self._too_late)

    def _too_late(self) -> None:
        """Close an idle connection, or refuse a request whose headers or body are too slow."""
        if self.awaited == "another":
            self.transport.close()
        else:
            self._refuse(HEADERS_TOO_SLOW if self.awaited == "headers" else BODY_TOO_SLOW)

    def _take_the_place_of_another(self) -> bool:
        """Drop who has waited longest without a request; False where all have one."""
        others = [other for other in open_connections(self.server_state) if other is not self]
        waiting = [other for other in others if other.awaited in ("headers", "another")]
        idle = [other for other in waiting if other.transport.get_write_buffer_size() == 0]
        if idle:
            min(idle, key=lambda other: other.since).transport.abort()
        return bool(idle)

    def _refuse(self, refusal: Refusal) -> None:
        """Say no and close; where an answer has begun there is nothing to say."""
        if self.cycle is not None:  # the application, if it waits for the body, learns that nobody is there
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        asked = self.headers if self.cycle is not None and not self.cycle.response_complete else ()
        fields = [*refusal.fields(), (HEADER, request_id(asked)), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=refusal.status, headers=fields, reason=refusal.reason()),
            h11.Data(data=refusal.body()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._leave()

    def _leave(self) -> None:
        """Close once the client has, or soon: what it still sends would make the system withhold our last words."""
        self._wait_for("nothing")
        self._leaving = True
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LEAVING_SECONDS, self.transport.abort)

    def _see_it_read(self, before: int) -> None:
        """Drop the connection unless its buffer shrinks between two looks."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.limits.unread_seconds, self._see_it_read, left)


def open_connections(state: ServerState) -> list[Connection]:
    """List the connections that are open now."""
    return [each for each in state.connections if isinstance(each, Connection)]
