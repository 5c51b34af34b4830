"""Answers as streams of server-sent events, which end well, end with an error, or end with their client.

Source: the HTML standard, section 9.2 (format); OpenAI's API reference (`[DONE]`).
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import MadeToken
from llorch.apps.serve.http import naming
from llorch.apps.serve.replies import ErrorReply, Reply
from llorch.apps.serve.response_stream import Answering, of_failure

SILENCE = 10.0  # seconds after which a stream says that it is alive
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_LOG = logging.getLogger("llorch.apps.serve")


def event(body: Reply, name: str | None = None) -> bytes:
    """Encode one event of a stream."""
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + body.json_bytes() + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of events; a failure on the way is its last one. However it ends, `close` is called."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], ignored: Sequence[str] = ()) -> None:
        """Take the events, which may end in an ApiError, and a function that closes their source."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"} | naming(ignored)
        super().__init__(_with_errors(events), media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the client."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # here: a generator that never began has no end, and one that waits for its reader ends much later
            self._close()


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass events on; an error on the way becomes the last event."""
    try:
        async for some in events:
            yield some
    except ApiError as refusal:
        yield event(ErrorReply.model_validate(refusal.body()))
    except Exception as error:
        _LOG.error("a stream failed", exc_info=error)
        yield event(ErrorReply.model_validate(of_failure(error).body()))


async def tokens_as_events(answering: Answering, encode: Callable[[int, MadeToken], bytes]) -> AsyncIterator[bytes]:
    """Yield tokens as events when they come, all that are there at once, and a keep-alive comment meanwhile."""
    while answering.n_open:
        some = await answering.some(SILENCE)
        yield b"".join(encode(index, one) for index, one in some) if some else _KEEP_ALIVE
