"""Every route, by what a client knows of the key and where it comes from: a route without a row is red."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from fakes.raw_http import ask, error_code, request, served

pytest.importorskip("starlette", reason="NOT RUN: starlette is not installed")

KEY = "sk-r0utes"
GET = ("/health", "/metrics", "/openapi.json", "/v1/models", "/", "/script.js", "/style.css", "/icon.svg")
POST = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/trace", "/tokenize", "/detokenize")
# Method, and the status of an empty request that is let in.
ROWS = dict.fromkeys(GET, ("GET", 200)) | dict.fromkeys(POST, ("POST", 400)) | {"/no/such/route": ("GET", 404)}
KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"authorization": f"Bearer {KEY}0"},
    "no ASCII": {"authorization": "Bearer \u00e9"},
    "right": {"authorization": f"Bearer {KEY}"},
}
PLACES: dict[str, dict[str, str]] = {
    "here": {},
    "our page": {"origin": "http://localhost"},
    "foreign host": {"host": "evil.example"},
    "empty host": {"host": ":11434"},
    "foreign page": {"origin": "http://evil.example"},
}


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    from llorch.apps.serve.app import make_app
    from llorch.apps.serve.engine import Engine
    from llorch.apps.serve.scheduler import Turns
    from llorch.apps.serve.service import Service
    from llorch.model.model import load

    model = load("story")
    engine = Engine(Turns(model, n_jobs=1), n_jobs=1)
    engine.start()
    yield make_app(Service(model, engine, context=64, timeout=60, version="1"))
    engine.stop()


@pytest.fixture(scope="module")
def port(app: Any) -> Iterator[int]:
    from llorch.apps.serve.guard import Guard

    with served(Guard(app, key=KEY)) as running:
        yield running.port


def test_every_route_has_a_row(app: Any):
    assert {route.path for route in app.routes} <= ROWS.keys()


def expected(path: str, key: str, place: str) -> int:
    if place not in ("here", "our page"):
        return 403
    return ROWS[path][1] if key == "right" or path == "/health" else 401


@pytest.mark.parametrize("path", ROWS)
def test_who_is_let_in(port: int, path: str):
    method = ROWS[path][0]
    body = b"{}" if method == "POST" else b""
    for key, place in product(KEYS, PLACES):
        status, headers, said = ask(port, request(method, path, body, **PLACES[place], **KEYS[key]))
        assert status == expected(path, key, place), (key, place)
        assert not [name for name in headers if name.startswith("access-control")]
        if status >= 400:
            error_code(said)


@pytest.mark.parametrize("path", [path for path in ROWS if path != "/no/such/route"])
def test_other_methods_are_refused_with_those_that_are_meant(port: int, path: str):
    for method in {"GET": ("POST", "DELETE", "OPTIONS"), "POST": ("GET", "PUT", "OPTIONS")}[ROWS[path][0]]:
        status, headers, body = ask(port, request(method, path, authorization=f"Bearer {KEY}"))
        assert (status, error_code(body)) == (405, None)
        assert ROWS[path][0].lower() in headers["allow"]
