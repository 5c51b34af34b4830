"""Bodies in, answers out: strict JSON, and clients that leave before they have their answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve.api_errors import ApiError, of_validation
from llorch.apps.serve.engine import Busy, Unavailable
from llorch.apps.serve.replies import Reply
from llorch.apps.serve.response_stream import of_failure
from llorch.apps.serve.service import Service
from llorch.files.strict_json import parse_json
from llorch.runtime.errors import FormatError

Asked = TypeVar("Asked", bound=BaseModel)
Result = TypeVar("Result")
_SHOWN = 20  # ignored fields that are named


def service_of(request: Request) -> Service:
    """Return the service of the app."""
    return request.app.state.service


async def read_body(request: Request, kind: type[Asked]) -> Asked:
    """Read and check the body of a request; ApiError if it is wrong."""
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


async def run_beside_loop(
    service: Service, make: Callable[[], Result], *, n_answers: int = 1, renders: bool = False
) -> Result:
    """Do what may take long, such as tokenizing, beside the event loop; ApiError where so many wait already.

    What `renders` a chat template has a line of its own: nobody else waits for a template that takes its time.
    """
    thread = service.writing if renders else service.preparing
    try:
        with service.engine.place(n_answers):
            return await asyncio.get_running_loop().run_in_executor(thread, make)
    except (Busy, Unavailable) as error:
        raise of_failure(error) from None


async def unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Wait for an answer; give it up when the client leaves."""
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
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def reply(body: Reply, ignored: Sequence[str] = ()) -> Response:
    """Make a JSON response of a reply; `ignored` are the names of request fields that llorch does not implement."""
    return Response(body.json_bytes(), media_type="application/json", headers=naming(ignored))


def naming(ignored: Sequence[str]) -> dict[str, str]:
    """Make the header that names ignored fields, as far as a header can."""
    shown = [
        name
        for name in ignored
        if name.isascii() and name.replace("_", "").replace(".", "").isalnum() and len(name) <= 64
    ]
    return {"x-llorch-ignored": ", ".join(shown[:_SHOWN]) or "?"} if ignored else {}
