"""Read request bodies as strict JSON, and send replies; stop work for clients that disconnect."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve.api_errors import ApiError, to_validation_error
from llorch.apps.serve.engine import Busy, Unavailable
from llorch.apps.serve.replies import Reply
from llorch.apps.serve.response_stream import to_api_error
from llorch.apps.serve.service import Service
from llorch.files.strict_json import parse_json
from llorch.runtime.errors import FormatError

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Result = TypeVar("Result")
_MAX_NAMES = 20  # most ignored fields that the header lists


def get_service(request: Request) -> Service:
    """Return the app's service."""
    return request.app.state.service


async def read_body(request: Request, model: type[BodyModel]) -> BodyModel:
    """Read and validate the body of a request; raise ApiError if it is invalid."""
    content = await request.body()
    try:
        body = parse_json(content, what="the body", path="request")
    except FormatError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"body: expected a JSON object, got {type(body).__name__}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise to_validation_error(error, body) from None


async def run_in_thread(
    service: Service, make: Callable[[], Result], *, n_answers: int = 1, renders_template: bool = False
) -> Result:
    """Run a slow function, such as tokenizing, in a thread; raise ApiError if the engine has no place for `n_answers`.

    `renders_template` selects a separate thread, so that a slow chat template delays no other prompt.
    """
    thread = service.writing if renders_template else service.preparing
    try:
        with service.engine.reserve(n_answers):
            return await asyncio.get_running_loop().run_in_executor(thread, make)
    except (Busy, Unavailable) as error:
        raise to_api_error(error) from None


async def wait_for_answer(request: Request, answer: Awaitable[Response]) -> Response:
    """Wait for an answer, and cancel it if the client disconnects."""
    answer_task = asyncio.ensure_future(answer)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        return await answer_task if answer_task.done() else Response(status_code=499)  # only for the log
    finally:
        for task in (answer_task, disconnect_task):
            task.cancel()
        await asyncio.gather(answer_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def reply(body: Reply, ignored: Sequence[str] = ()) -> Response:
    """Make a JSON response of a reply; `ignored` are the names of request fields that llorch does not implement."""
    return Response(body.json_bytes(), media_type="application/json", headers=ignored_header(ignored))


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Make the header that lists ignored fields, without names that are unsafe in a header; `?` if none is safe."""
    safe_names = [
        name
        for name in ignored
        if name.isascii() and name.replace("_", "").replace(".", "").isalnum() and len(name) <= 64
    ]
    return {"x-llorch-ignored": ", ".join(safe_names[:_MAX_NAMES]) or "?"} if ignored else {}
