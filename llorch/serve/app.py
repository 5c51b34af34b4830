"""The app: every route of the server, and what becomes of errors.

http       bodies in, events out             requests, replies   what is asked and answered, as pydantic models
chat       a route a file                    service             names, limits, prompts to jobs
answering  answers of one request            engine              the thread that owns the batch; `work` in between
turns      a batch on the NumPy path         metrics, counts     what is counted
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llorch.serve import chat
from llorch.serve.api_errors import ApiError
from llorch.serve.http import reply, service_of
from llorch.serve.replies import Health, ModelCard, ModelList
from llorch.serve.service import Service


def make_app(service: Service) -> Starlette:
    """The routes of one model; its engine has to run."""
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat.answer, methods=["POST"]),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _failed},
    )
    app.state.service = service
    return app


async def health(request: Request) -> Response:
    """Whether requests are answered."""
    engine = service_of(request).engine
    trouble = "the server is shutting down" if engine.draining else engine.trouble
    if trouble is not None:
        raise ApiError(503, trouble, code="unavailable")
    return reply(Health(status="ok"))


async def models(request: Request) -> Response:
    """The model, and it with each adapter."""
    service = service_of(request)
    about = {"object": "model", "created": service.created, "owned_by": "llorch", "context_length": service.context}
    chats = "template" if service.has_template else "plain"
    return reply(ModelList(object="list", data=[ModelCard(id=name, chat=chats, **about) for name in service.names]))


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(service_of(request).engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is no such route", 405: f"{request.method} is not for this route"}
    response = ApiError(error.status_code, what.get(error.status_code, error.detail)).response()
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server has a bug; its log says more", code="internal_error").response()
