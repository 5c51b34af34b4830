"""Bodies in, answers out: strict JSON, streams of events, and clients that leave before they have their answer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llorch.errors import FormatError
from llorch.files.strict_json import parse_json
from llorch.serve.answering import of_failure
from llorch.serve.api_errors import ApiError, of_validation
from llorch.serve.replies import ErrorReply, Reply
from llorch.serve.service import Service

Asked = TypeVar("Asked", bound=BaseModel)
Result = TypeVar("Result")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_LOG = logging.getLogger("llorch.serve")
_SHOWN = 20  # ignored fields that are named


def service_of(request: Request) -> Service:
    """What the app serves."""
    return request.app.state.service


async def read(request: Request, kind: type[Asked]) -> Asked:
    """The body of a request; ApiError where it is not what it has to be."""
    data = await request.body()
    try:
        body = parse_json(data, what="the body", path="request")
    except FormatError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"body: expected a JSON object, got {type(body).__name__}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise of_validation(error, body) from None


async def prepared(service: Service, make: Callable[[], Result]) -> Result:
    """Do what may take long, such as tokenizing, beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(service.preparing, make)


async def unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """An answer, which is given up when the client leaves."""
    made = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await made if made.done() else Response(status_code=499)
    finally:
        for task in (made, gone):
            task.cancel()
        await asyncio.gather(made, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def reply(body: Reply, ignored: Sequence[str] = ()) -> Response:
    """JSON."""
    return Response(body.json_bytes(), media_type="application/json", headers=naming(ignored))


def event(body: Reply, name: str | None = None) -> bytes:
    """One event of a stream."""
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + body.json_bytes() + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of events; a failure on the way is its last one. However it ends, `close` is called."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], ignored: Sequence[str] = ()) -> None:
        """Of events, which may end in a ApiError."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"} | naming(ignored)
        super().__init__(_told(events), media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # here: a generator that never began has no end, and one that waits for its reader ends much later
            self._close()


async def _told(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for some in events:
            yield some
    except ApiError as refusal:
        yield event(ErrorReply.model_validate(refusal.body()))
    except Exception as error:
        _LOG.error("a stream failed", exc_info=error)
        yield event(ErrorReply.model_validate(of_failure(error).body()))


def naming(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names ignored fields, as far as a header can."""
    shown = [name for name in ignored if name.isascii() and name.replace("_", "").isalnum() and len(name) <= 64]
    return {"x-llorch-ignored": ", ".join(shown[:_SHOWN]) or "?"} if ignored else {}
