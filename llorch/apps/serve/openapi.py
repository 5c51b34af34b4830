"""`/openapi.json`: what the routes take and give, from the same pydantic models that check it. OpenAPI 3.1."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve.replies import ErrorReply

_SCHEMAS = "#/components/schemas/"
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
_STATUSES = {
    400: "A field is wrong, or the context is exceeded.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin header is not allowed.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "The waiting list is full.",
    500: "The answer failed.",
    503: "The server is shutting down, or the engine died.",
    504: "The answer took too long.",
}


@dataclass(frozen=True)
class Described:
    """A route, and what is said of it."""

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    replied: type[BaseModel] | str  # or a media type
    asked: type[BaseModel] | None = None  # a body, which is posted
    streams: bool = False  # where the body says `stream`

    @property
    def method(self) -> str:
        """HTTP method of the route."""
        return "GET" if self.asked is None else "POST"


def description(routes: Sequence[Described], *, version: str) -> dict[str, Any]:
    """Make the whole document."""
    asked = [(route.asked, "validation") for route in routes if route.asked is not None]
    replied = [(route.replied, "serialization") for route in routes if not isinstance(route.replied, str)]
    models: Any = [*asked, *replied, (ErrorReply, "serialization")]
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "llorch", "version": version, "description": "The OpenAI interface for one model."},
        "paths": {route.path: {route.method.lower(): _operation(route)} for route in routes},
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Described) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(route.replied, str):
        content[route.replied] = {"schema": {"type": "string" if route.replied.startswith("text/") else "object"}}
    else:
        content["application/json"] = _schema(route.replied)
    if route.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    errors = _STATUSES if route.asked else {status: _STATUSES[status] for status in (401, 403, 503)}
    wrong = {
        str(status): {"description": text, "content": {"application/json": _schema(ErrorReply)}}
        for status, text in errors.items()
    }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **wrong},
        "security": [{}] if route.path == "/health" else [{}, {"key": []}],
    }
    if route.asked is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(route.asked)}}
    return operation


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _SCHEMAS + model.__name__}}
