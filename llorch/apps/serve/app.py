"""The ASGI app: all routes, their OpenAPI 3.1 description, and the answers to errors.

chat, completions, responses, tracing                      handlers of the routes
http, events                                               read bodies; answer at once, or as a stream of events
requests, replies, unsupported_fields                      pydantic models of requests and replies
api_errors                                                 errors in OpenAI's format
service, grammar                                           one model: turn prompts and JSON schemas into jobs
response_stream, engine                                    answers of one request; the thread that owns the batch
scheduler                                                  the batch of the NumPy model
connection, server, guard, refusal                         connections and their limits, checks of each request
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
from llorch.apps.serve.http import get_service, reply
from llorch.apps.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, TraceRequest
from llorch.apps.serve.responses import ResponsesRequest
from llorch.apps.serve.service import Service

_SCHEMAS = "#/components/schemas/"
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
_STATUS_TEXTS = {
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
class ApiRoute:
    """A route and its description."""

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    response: type[BaseModel] | str  # a model, or a media type
    body: type[BaseModel] | None = None  # model of the request body of a POST
    streams: bool = False  # True if the body has the field `stream`

    @property
    def method(self) -> str:
        """HTTP method of the route."""
        return "GET" if self.body is None else "POST"


def description(routes: Sequence[ApiRoute], *, version: str) -> dict[str, Any]:
    """Make the OpenAPI document of some routes; `version` is llorch's."""
    body_models = [(route.body, "validation") for route in routes if route.body is not None]
    response_models = [(route.response, "serialization") for route in routes if not isinstance(route.response, str)]
    models: Any = [*body_models, *response_models, (replies.ErrorReply, "serialization")]
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "llorch", "version": version, "description": "The OpenAI interface for one model."},
        "paths": {route.path: {route.method.lower(): _operation(route)} for route in routes},
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(route.response, str):
        content[route.response] = {"schema": {"type": "string" if route.response.startswith("text/") else "object"}}
    else:
        content["application/json"] = _schema(route.response)
    if route.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    errors = _STATUS_TEXTS if route.body else {status: _STATUS_TEXTS[status] for status in (401, 403, 503)}
    error_responses = {
        str(status): {"description": text, "content": {"application/json": _schema(replies.ErrorReply)}}
        for status, text in errors.items()
    }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **error_responses},
        "security": [{}] if route.path == "/health" else [{}, {"key": []}],  # {}: without a key
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(route.body)}}
    return operation


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _SCHEMAS + model.__name__}}


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = Path(__file__).parent / "page"
PAGE_FILES = {  # path -> file in the folder, media type
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
    """Build the app of one model; its engine must be running."""
    app = Starlette(
        routes=[Route(route.path, route.endpoint, methods=[route.method]) for route in ROUTES],
        exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_error, Exception: _answer_bug},
        middleware=[Middleware(_RequestCounter, metrics=service.engine.metrics)],
    )
    app.state.service = service
    return app


async def health(request: Request) -> Response:
    """Answer 200 while the engine works, else 503."""
    engine = get_service(request).engine
    reason = "the server is shutting down" if engine.draining else engine.unavailable_reason
    if reason is not None:
        raise ApiError(503, reason, code="unavailable")
    return reply(replies.Health(status="ok"))


async def models(request: Request) -> Response:
    """List the model without an adapter and with each adapter."""
    service = get_service(request)
    common = {"object": "model", "created": service.created, "owned_by": "llorch", "context_length": service.context}
    chats, numerics = "template" if service.has_template else "plain", str(service.model.weights.numerics)
    cards = [replies.ModelCard(id=name, chat=chats, numerics=numerics, **common) for name in service.names]
    return reply(replies.ModelList(object="list", data=cards))


async def metrics(request: Request) -> Response:
    """Answer with the server's metrics in Prometheus format."""
    return Response(get_service(request).engine.metrics.text(), media_type=_PROMETHEUS)


async def openapi(request: Request) -> Response:
    """Answer with the OpenAPI document of all routes."""
    return JSONResponse(description(ROUTES, version=get_service(request).version))


async def page_file(request: Request) -> Response:
    """Answer with one file of the web page."""
    name, kind = PAGE_FILES[request.url.path]
    return Response((_PAGE / name).read_bytes(), media_type=kind, headers=_PAGE_HEADERS)


ROUTES = (
    *(ApiRoute(path, page_file, "The page for a browser.", kind) for path, (_, kind) in PAGE_FILES.items()),
    ApiRoute("/health", health, "Health of the server.", replies.Health),
    ApiRoute("/metrics", metrics, "Counters, for Prometheus.", "text/plain"),
    ApiRoute("/openapi.json", openapi, "This description.", "application/json"),
    ApiRoute("/v1/models", models, "The model, alone and with each adapter.", replies.ModelList),
    ApiRoute("/v1/chat/completions", chat.answer, "Answer a conversation.", replies.ChatCompletion, ChatRequest, True),
    ApiRoute("/v1/completions", completions.answer, "Continue texts.", replies.Completion, CompletionRequest, True),
    ApiRoute("/v1/responses", responses.answer, "Answer a conversation.", replies.Response, ResponsesRequest, True),
    ApiRoute("/v1/trace", tracing.answer, "Values of every stage.", replies.Trace, TraceRequest),
    ApiRoute("/tokenize", completions.tokenize, "Convert text to token ids.", replies.Tokenized, TokenizeRequest),
    ApiRoute(
        "/detokenize", completions.detokenize, "Convert token ids to text.", replies.Detokenized, DetokenizeRequest
    ),
)


_OTHER_SERVERS = {  # paths of llama.cpp, Ollama, TGI
    "/completion": "/v1/completions", "/api/generate": "/v1/completions", "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions", "/api/chat": "/v1/chat/completions", "/v1/chat": "/v1/chat/completions",
    "/chat": "/v1/chat/completions", "/api/tags": "/v1/models", "/api/v0/models": "/v1/models",
}  # fmt: skip


class _RequestCounter:
    """ASGI middleware that counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._paths = {route.path for route in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["path"] if scope["path"] in self._paths else "other"

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_request(route, message["status"])
            await send(message)

        await self._app(scope, receive, send_and_count)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: _describe_unknown_route(request.url.path), 405: f"{request.method} is not a method of this route"}
    response = ApiError(error.status_code, texts.get(error.status_code, error.detail)).response()
    response.headers.update(error.headers or {})
    return response


def _describe_unknown_route(path: str) -> str:
    """Describe an unknown path, with the route that it probably means."""
    route = guess_route(path)
    return f"there is no such route; {'/openapi.json lists all routes' if route is None else f'use {route}'}"


def guess_route(path: str) -> str | None:
    """Guess the route of a path with extra slashes, without /v1, with a prefix, or of another server; else None."""
    path_ = re.sub("/+", "/", path).rstrip("/").lower()
    paths = [route.path for route in ROUTES if route.path != "/"]
    spellings = [path_, f"/v1{path_}", *(route for route in paths if path_.endswith(route)), _OTHER_SERVERS.get(path_)]
    return next((route for route in spellings if route in paths), None)


async def _answer_bug(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server has a bug; the server log has the details", code="internal_error").response()
