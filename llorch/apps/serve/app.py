"""The app: every route of the server, their description (OpenAPI 3.1), and what becomes of errors.

chat, completions, responses, tracing                      the routes
http, events                                               bodies in; answers out, whole and as streams
requests, replies, unsupported_fields                      pydantic models of requests and answers
api_errors                                                 errors of the OpenAI interface
service, grammar                                           names and limits; prompts and forms become jobs
response_stream, engine                                    an answer, its job, the thread that owns the batch
scheduler                                                  a batch on the NumPy path
connection, server, guard, refusal                         connections, their limits, checks of each request
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch.apps.serve import chat, completions, replies, responses, tracing
from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import Metrics
from llorch.apps.serve.http import reply, service_of
from llorch.apps.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, TraceRequest
from llorch.apps.serve.responses import ResponsesRequest
from llorch.apps.serve.service import Service

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
    models: Any = [*asked, *replied, (replies.ErrorReply, "serialization")]
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
        str(status): {"description": text, "content": {"application/json": _schema(replies.ErrorReply)}}
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


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = Path(__file__).parent / "page"
PAGE_FILES = {  # by path: what lies in the folder, and its type
    "/": ("index.html", "text/html"),
    "/script.js": ("script.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(service: Service) -> Starlette:
    """Build the routes of one model, with a running engine."""
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in ROUTES],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _failed},
        middleware=[Middleware(_Counted, metrics=service.engine.metrics)],
    )
    app.state.service = service
    return app


async def health(request: Request) -> Response:
    """Answer 200 while requests are answered."""
    engine = service_of(request).engine
    trouble = "the server is shutting down" if engine.draining else engine.trouble
    if trouble is not None:
        raise ApiError(503, trouble, code="unavailable")
    return reply(replies.Health(status="ok"))


async def models(request: Request) -> Response:
    """List the model, alone and with each adapter."""
    service = service_of(request)
    about = {"object": "model", "created": service.created, "owned_by": "llorch", "context_length": service.context}
    chats = "template" if service.has_template else "plain"
    cards = [replies.ModelCard(id=name, chat=chats, **about) for name in service.names]
    return reply(replies.ModelList(object="list", data=cards))


async def metrics(request: Request) -> Response:
    """Answer the metrics of the server in the format of Prometheus."""
    return Response(service_of(request).engine.metrics.text(), media_type=_PROMETHEUS)


async def openapi(request: Request) -> Response:
    """Describe the input and the output of all routes."""
    return JSONResponse(description(ROUTES, version=service_of(request).version))


async def page_file(request: Request) -> Response:
    """Answer with one file of the web page."""
    name, kind = PAGE_FILES[request.url.path]
    return Response((_PAGE / name).read_bytes(), media_type=kind, headers=_PAGE_HEADERS)


ROUTES = (
    *(Described(path, page_file, "The page for a browser.", kind) for path, (_, kind) in PAGE_FILES.items()),
    Described("/health", health, "Health of the server.", replies.Health),
    Described("/metrics", metrics, "Counters, for Prometheus.", "text/plain"),
    Described("/openapi.json", openapi, "This description.", "application/json"),
    Described("/v1/models", models, "The model, alone and with each adapter.", replies.ModelList),
    Described("/v1/chat/completions", chat.answer, "Answer a conversation.", replies.ChatCompletion, ChatRequest, True),
    Described("/v1/completions", completions.answer, "Continue texts.", replies.Completion, CompletionRequest, True),
    Described("/v1/responses", responses.answer, "Answer a conversation.", replies.Response, ResponsesRequest, True),
    Described("/v1/trace", tracing.answer, "Values of every stage.", replies.Trace, TraceRequest),
    Described("/tokenize", completions.tokenize, "Convert text to token ids.", replies.Tokenized, TokenizeRequest),
    Described(
        "/detokenize", completions.detokenize, "Convert token ids to text.", replies.Detokenized, DetokenizeRequest
    ),
)


_ELSEWHERE = {  # paths of llama.cpp, Ollama, TGI
    "/completion": "/v1/completions", "/api/generate": "/v1/completions", "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions", "/api/chat": "/v1/chat/completions", "/v1/chat": "/v1/chat/completions",
    "/chat": "/v1/chat/completions", "/api/tags": "/v1/models", "/api/v0/models": "/v1/models",
}  # fmt: skip


class _Counted:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._paths = {one.path for one in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: _no_such_route(request.url.path), 405: f"{request.method} is not a method of this route"}
    response = ApiError(error.status_code, what.get(error.status_code, error.detail)).response()
    response.headers.update(error.headers or {})
    return response


def _no_such_route(path: str) -> str:
    """Name the route that was meant, as far as its path tells; all of them otherwise."""
    meant = meant_route(path)
    return f"there is no such route; {'/openapi.json lists all routes' if meant is None else f'use {meant}'}"


def meant_route(path: str) -> str | None:
    """Guess the route of a path with too many slashes, without /v1, with a prefix, or of another server's path."""
    asked = re.sub("/+", "/", path).rstrip("/").lower()
    known = [one.path for one in ROUTES if one.path != "/"]
    spelt = [asked, f"/v1{asked}", *(route for route in known if asked.endswith(route)), _ELSEWHERE.get(asked)]
    return next((route for route in spelt if route in known), None)


async def _failed(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server has a bug; the server log has the details", code="internal_error").response()
