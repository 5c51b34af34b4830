"""Answers as streams of server-sent events. A stream ends with its answer, with an error, or with its client.

Source: the HTML standard, section 9.2 (format); OpenAI's API reference (`[DONE]`).
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import NewToken
from llorch.apps.serve.http import ignored_header
from llorch.apps.serve.replies import ErrorReply, Reply
from llorch.apps.serve.response_stream import AnswerStream, to_api_error

KEEP_ALIVE_SECONDS = 10.0  # without a token, then a stream sends a comment
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_LOG = logging.getLogger("llorch.apps.serve")


def event(body: Reply, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + body.json_bytes() + b"\n\n"


class EventStream(StreamingResponse):
    """Response that streams events; an error becomes the last event. `close` is called however it ends."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], ignored: Sequence[str] = ()) -> None:
        """Take the events, whose iterator may raise an ApiError, and a function that closes their source."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"} | ignored_header(ignored)
        super().__init__(_with_errors(events), media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the client."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # not in the generator: one that never began runs no code, and a suspended one is closed much later
            self._close()


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events; turn an error into the last event."""
    try:
        async for data in events:
            yield data
    except ApiError as refusal:
        yield event(ErrorReply.model_validate(refusal.body()))
    except Exception as error:
        _LOG.error("a stream failed", exc_info=error)
        yield event(ErrorReply.model_validate(to_api_error(error).body()))


async def stream_tokens(stream: AnswerStream, encode: Callable[[int, NewToken], bytes]) -> AsyncIterator[bytes]:
    """Yield new tokens as events, all available ones at once, and a keep-alive comment while there are none."""
    while stream.n_open:
        tokens = await stream.next_tokens(KEEP_ALIVE_SECONDS)
        yield b"".join(encode(index, token) for index, token in tokens) if tokens else _KEEP_ALIVE
