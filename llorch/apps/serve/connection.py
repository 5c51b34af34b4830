"""One connection: uvicorn's HTTP/1.1 protocol with a time limit for everything that a client does.

    headers    request line and headers must arrive within `header_seconds`, else 408, and must be short, else 431
    body       the body must arrive within `body_seconds` after them, else 408; one length, or chunks, else 400
    answer     a connection whose client reads no byte for `unread_seconds` is dropped
    idle       a connection without another request for `idle_seconds` is closed

A client may close its sending side after the request (`nc -N`). A client that has disconnected looks the same at first.
An interim response, `100 Continue`, makes the client's system report a disconnect. HTTP/1.1 allows it before the
answer begins. Later, the end of a client's data closes the connection, so that an unread stream frees its place.

If the maximum of `connections` is open, a new connection replaces the one that has been idle longest.
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

Awaited = Literal["headers", "body", "another", "nothing"]  # part that the client must send; another: a new request

CLOSING_SECONDS = 2.0  # for a client to close after a refusal
POLL_SECONDS = 0.05  # between checks of a client that has closed its sending side
POLLS_PER_PROBE = 20  # an interim response each second, because a client may disconnect later


@dataclass(frozen=True)
class ClientLimits:
    """Limits of time and size for each client, and of connections."""

    header_seconds: float = 10.0
    body_seconds: float = 30.0
    unread_seconds: float = 30.0
    idle_seconds: float = 30.0
    grace_seconds: float = 30.0  # for running answers, once the server is stopping
    header_bytes: int = 16384
    connections: int = 2048


class StrictParser(h11.Connection):
    """h11 parser that also refuses two lengths of a body, chunks in HTTP/1.0, and long headers that arrive at once."""

    def __init__(self, header_bytes: int) -> None:
        """Parse as a server, with a limit on the bytes of the headers."""
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes

    def next_event(self) -> Any:
        """Return the next event, see h11; raise h11.RemoteProtocolError for a refused request."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = [name for name, _ in event.headers]
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise self._make_error("expected one length of the body, got two", 400)
            if len(event.target) + sum(len(name) + len(value) for name, value in event.headers) > self._header_bytes:
                raise self._make_error("long headers", 431)
        return event

    def _make_error(self, reason: str, status: int) -> h11.RemoteProtocolError:
        """Put the parser into its error state, and return the error to raise."""
        self._process_error(self.their_role)
        return h11.RemoteProtocolError(reason, error_status_hint=status)


class Connection(H11Protocol):
    """Connection of one client; see the module."""

    def __init__(self, config: Config, state: ServerState, limits: ClientLimits) -> None:
        """Serve one connection; `state` is uvicorn's record of open connections."""
        super().__init__(config, state, {})
        self.limits = limits
        self.conn = StrictParser(limits.header_bytes)
        self.awaited: Awaited = "nothing"
        self.waiting_since = 0.0  # loop time at which it began to wait for `awaited`
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._reading_check: asyncio.TimerHandle | None = None
        self._has_client_finished = False  # the client has closed its sending side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a request; refuse the connection if too many are open."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` reports every unread byte
        self._expect("headers")
        if len(self.connections) > self.limits.connections and not self._drop_idle_connection():
            self._refuse(FULL)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the connection was refused."""
        if not self._is_refused:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override] (uvicorn closes whatever is open)
        """Keep a connection whose client only reads from now on; return False, which closes it, in all other cases."""
        self._has_client_finished = self._is_answer_pending() and self.scope["http_version"] == "1.1"
        if self._has_client_finished:
            self._poll_client()
        return self._has_client_finished

    def on_response_complete(self) -> None:
        """Close the connection if the client sends no more requests."""
        super().on_response_complete()
        if self._has_client_finished and not self._is_answer_pending():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline of the connection."""
        self._expect("nothing")
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle the parsed events, and set the deadline of the next part."""
        super().handle_events()
        self._expect(self._awaited_part())

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 could not parse."""
        error = sys.exception()
        too_large = getattr(error, "error_status_hint", 400) == 431
        self._refuse(HEADERS_TOO_LARGE if too_large else MALFORMED)

    def pause_writing(self) -> None:
        """Stop writing until the client reads; drop the connection if it does not read."""
        super().pause_writing()
        self._check_reading(self.transport.get_write_buffer_size() + 1)  # + 1: the first check only notes the size

    def resume_writing(self) -> None:
        """Stop checking, because the client has read all data."""
        super().resume_writing()
        if self._reading_check is not None:
            self._reading_check.cancel()

    def _is_answer_pending(self) -> bool:
        """Tell if a complete request waits for the beginning of its answer."""
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.our_state is h11.SEND_RESPONSE
            and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        )

    def _poll_client(self, n_polls: int = 0) -> None:
        """Drop a client that has disconnected; its system reports a disconnect only after llorch sends something."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if n_polls % POLLS_PER_PROBE == 0 and self._is_answer_pending():
            probe = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(probe) or b"")
        self.loop.call_later(POLL_SECONDS, self._poll_client, n_polls + 1)

    def _awaited_part(self) -> Awaited:
        """Return the part of a request that the client must send next."""
        if self.transport.is_closing() or h11.ERROR in (self.conn.our_state, self.conn.their_state):
            return "nothing"
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.conn.their_state is h11.IDLE:
            return "headers" if self.cycle is None or self.conn.trailing_data[0] else "another"
        return "nothing"

    def _expect(self, awaited: Awaited) -> None:
        """Set the deadline of the part that the client must send next; none for `nothing`; the same part keeps it."""
        if awaited == self.awaited:
            return
        self.awaited, self.waiting_since = awaited, self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
        limits = self.limits
        seconds = {"headers": limits.header_seconds, "body": limits.body_seconds, "another": limits.idle_seconds}
        if awaited != "nothing":
            self._deadline = self.loop.call_later(seconds[awaited], self._on_deadline)

    def _on_deadline(self) -> None:
        """Close an idle connection, or refuse a request with slow headers or a slow body."""
        if self.awaited == "another":
            self.transport.close()
        else:
            self._refuse(HEADERS_TOO_SLOW if self.awaited == "headers" else BODY_TOO_SLOW)

    def _drop_idle_connection(self) -> bool:
        """Drop the connection that has been idle longest; return False if none is idle."""
        connections = [connection for connection in open_connections(self.server_state) if connection is not self]
        waiting = [connection for connection in connections if connection.awaited in ("headers", "another")]
        idle = [connection for connection in waiting if connection.transport.get_write_buffer_size() == 0]
        if idle:
            min(idle, key=lambda connection: connection.waiting_since).transport.abort()
        return bool(idle)

    def _refuse(self, refusal: Refusal) -> None:
        """Send a refusal and close; if an answer has begun, abort without a refusal."""
        if self.cycle is not None:  # wake the application if it waits for the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        request_headers = self.headers if self.cycle is not None and not self.cycle.response_complete else ()
        fields = [*refusal.fields(), (HEADER, request_id(request_headers)), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=refusal.status, headers=fields, reason=refusal.reason()),
            h11.Data(data=refusal.body()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._close_gracefully()

    def _close_gracefully(self) -> None:
        """Close after the client, or after CLOSING_SECONDS: closing while it still sends would discard the refusal."""
        self._expect("nothing")
        self._is_refused = True
        self.transport.write_eof()
        self._deadline = self.loop.call_later(CLOSING_SECONDS, self.transport.abort)

    def _check_reading(self, earlier_size: int) -> None:
        """Drop the connection unless its write buffer has shrunk since the last check."""
        size = self.transport.get_write_buffer_size()
        if size >= earlier_size:
            self.transport.abort()
        else:
            self._reading_check = self.loop.call_later(self.limits.unread_seconds, self._check_reading, size)


def open_connections(state: ServerState) -> list[Connection]:
    """List the open connections."""
    return [connection for connection in state.connections if isinstance(connection, Connection)]
