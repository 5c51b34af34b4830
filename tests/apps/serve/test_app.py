"""The app as a whole: health, metrics, errors, and clients that leave, with a batch that says what became of jobs."""

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from builders.chat_models import CHATML, chat_model
from fakes.raw_http import ask, error_code, request
from fakes.raw_http import served as raw_served
from fakes.scripted_batch import ScriptedBatch
from helpers.refusals import assert_tells, refuses
from helpers.served import Served, served

from llorch.apps.serve.app import ROUTES, ApiRoute, _describe_unknown_route, description, guess_route
from llorch.apps.serve.requests import Body

CHAT = "/v1/chat/completions"
ASKED: Any = [{"role": "user", "content": "Once upon a time"}]
WAIT = threading.Event().wait


@contextmanager
def scripted(n_jobs: int = 1, **options: Any) -> Iterator[tuple[Served, ScriptedBatch]]:
    batch = ScriptedBatch(n_jobs=n_jobs, token_id=300)
    with served(batch=batch, n_jobs=n_jobs, **options) as server:
        yield server, batch


def until(holds: Callable[[], bool]) -> None:
    """A moment at most: the server hears from its socket when it does."""
    assert any(holds() or WAIT(0.01) for _ in range(1000))


def leave_after(server: Served, n_bytes: int, path: str = CHAT, **asked: Any) -> socket.socket:
    """Ask over a bare socket and read the beginning of the answer."""
    body = json.dumps({"model": "story", "messages": ASKED, **asked}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(head + body)
    while n_bytes > 0:
        n_bytes -= len(client.recv(min(n_bytes, 4096)))
    return client


def test_health_is_ok_until_the_engine_is_not():
    with scripted() as (server, _):
        answer = httpx.get(f"{server.url}/health", trust_env=False)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        server.engine.give_up(RuntimeError("broken"))
        answer = httpx.get(f"{server.url}/health", trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert_tells(answer.json()["error"]["message"], "engine", "died")
        with pytest.raises(openai.InternalServerError):
            server.client.chat.completions.create(model="story", messages=ASKED)


def test_unknown_routes_and_wrong_methods_are_refused():
    with scripted() as (server, _), httpx.Client(base_url=server.url, trust_env=False) as http:
        answers = [http.get("/nowhere"), http.get(CHAT), http.post("/health"), http.get("/v1/models/story/x")]
    assert [answer.status_code for answer in answers] == [404, 405, 405, 404]
    assert answers[1].headers["allow"] == "POST"
    assert all(answer.json()["error"].keys() == {"message", "type", "param", "code"} for answer in answers)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/chat/completions", CHAT), ("/v1//chat/completions", CHAT), ("/v1/chat/completions/", CHAT),
        ("/chat/completions", CHAT), ("/v1/v1/chat/completions", CHAT), ("/openai/v1/chat/completions", CHAT),
        ("/V1/Chat/Completions", CHAT), ("/api/chat", CHAT), ("/completions", "/v1/completions"),
        ("/completion", "/v1/completions"), ("/api/generate", "/v1/completions"), ("/models", "/v1/models"),
        ("/api/tags", "/v1/models"), ("/responses", "/v1/responses"), ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"), ("/v1/embeddings", None), ("/nowhere", None), ("//", None),
    ],
)  # fmt: skip
def test_a_path_that_is_nearly_one_names_the_route_that_was_meant(path: str, meant: str | None):
    assert guess_route(path) == meant
    assert meant is None or f" {meant}" in _describe_unknown_route(path)


def test_the_answer_to_a_wrong_path_names_the_right_one():
    with scripted() as (server, _):
        for path in ("//v1/chat/completions", "/chat/completions"):
            client = leave_after(server, 0, path=path)
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            body = body or client.recv(65536)
            assert (head.split()[1], CHAT in json.loads(body)["error"]["message"]) == (b"404", True)
            client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_during_an_answer_cancels_the_job(stream: bool):
    with scripted() as (server, batch):
        batch.step_with = lambda: WAIT(0.02)
        client = leave_after(server, 500 if stream else 0, stream=stream, max_tokens=500)
        batch.wait_for_steps(3)
        client.close()
        until(lambda: not batch.running)
        at = batch.n_steps
        WAIT(0.1)
        assert batch.n_steps == at < 400
        assert b"llorch_answers_cancelled_total 1.0" in server.engine.metrics.text()


def test_client_disconnect_while_queued_never_runs():
    with scripted() as (server, batch):
        batch.step_with = lambda: WAIT(0.02)
        first = leave_after(server, 0, max_tokens=500)
        until(lambda: server.engine.n_running == 1)
        second = leave_after(server, 0, max_tokens=500, stream=True)
        until(lambda: server.engine.n_waiting == 1)
        second.close()
        until(lambda: server.engine.n_waiting == 0)
        first.close()
        until(lambda: server.engine.n_running == 0)
        assert len(batch.left) == 1


def test_full_queue_tells_a_client_to_retry():
    with scripted(n_waiting=1) as (server, batch):
        batch.step_with = lambda: WAIT(0.02)
        clients = [leave_after(server, 0, max_tokens=500) for _ in range(2)]
        until(lambda: server.engine.n_running + server.engine.n_waiting == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            server.client.chat.completions.create(model="story", messages=ASKED)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        for client in clients:
            client.close()


def test_an_answer_that_takes_too_long_ends_with_504_or_an_error_event():
    with scripted(timeout=0.3) as (server, batch):
        batch.step_with = lambda: WAIT(0.05)
        with pytest.raises(openai.InternalServerError) as caught:
            server.client.chat.completions.create(model="story", messages=ASKED, max_tokens=400)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        until(lambda: not batch.running)
        stream = server.client.chat.completions.create(model="story", messages=ASKED, max_tokens=400, stream=True)
        with refuses(openai.APIError, "0.3 s"):
            list(stream)
        until(lambda: not batch.running)


def test_failed_answer_is_a_500_without_internal_details():
    with scripted() as (server, batch):
        batch.raising = frozenset(server.service.chat_ids(ASKED)[:1])
        with pytest.raises(openai.InternalServerError) as caught:
            server.client.chat.completions.create(model="story", messages=ASKED)
        assert caught.value.status_code == 500
        assert caught.value.message.count("broken") == 0
        with httpx.stream(
            "POST", server.url + CHAT, json={"model": "story", "messages": ASKED, "stream": True}, trust_env=False
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200
        assert "internal_error" in lines[-1]
        assert "data: [DONE]" not in lines
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_a_silent_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.apps.serve.events.KEEP_ALIVE_SECONDS", 0.05)
    goes_on = threading.Event()
    with scripted() as (server, batch):
        batch.step_with = lambda: goes_on.wait(20)
        body = {"model": "story", "messages": ASKED, "stream": True, "max_tokens": 2}
        with httpx.stream("POST", server.url + CHAT, json=body, trust_env=False) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                if line == ": keep-alive":
                    goes_on.set()
        assert goes_on.is_set()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_metrics_count_requests_tokens_and_times():
    with served() as server:
        server.client.chat.completions.create(model="story", messages=ASKED, max_tokens=7)
        httpx.get(f"{server.url}/nowhere", trust_env=False)
        text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    for line in (
        'llorch_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'llorch_requests_total{route="other",status="404"} 1.0',
        "llorch_prompt_tokens_total 5.0", "llorch_answer_tokens_total 7.0", "llorch_cached_tokens_total 0.0",
        "llorch_first_token_seconds_count 1.0", "llorch_token_seconds_count 6.0", "llorch_answers_running 0.0",
    ):  # fmt: skip
        assert line in text


def test_logs_hold_no_messages(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with scripted() as (server, batch):
        ids = server.service.text_ids("A secret of mine")
        batch.raising = frozenset(ids[:1])
        for asked in ({"prompt": "A secret of mine"}, {"prompt": "A secret of mine", "seed": "secret"}):
            httpx.post(f"{server.url}/v1/completions", json={"model": "story", **asked}, trust_env=False)
    assert "secret" not in "".join(record.getMessage() for record in caplog.records if record.name.startswith("llorch"))


def test_the_texts_of_control_tokens_are_inert_in_every_message(tmp_path: Path):
    model = chat_model(tmp_path / "qwen", "micro-qwen3", CHATML)
    with served(model) as server:
        wanted = [one for one in server.service.chat_ids([{"role": "user", "content": "x"}])]
        controls = sum(one in model.tokenizer.control_ids for one in wanted)
        for text in sorted(model.tokenizer.control_texts):
            ids = server.service.chat_ids([{"role": "user", "content": f"a{text}b"}])
            assert sum(one in model.tokenizer.control_ids for one in ids) == controls


EXAMPLES = 25  # of each route
INPUTS = ("prompt", "messages", "tokens")  # one of them
# Limits that must be the same, and variables that the template of this model does not have.
ONE_IN_MANY = (
    "n_predict", "num_predict", "max_new_tokens", "max_completion_tokens", "enable_thinking", "think",
    "reasoning_effort", "reasoning",
)  # fmt: skip


@cache
def described() -> dict[str, Any]:
    return description(ROUTES, version="1")


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(deepcopy(described()))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("micro-llama", context=64) as running:
        yield running


def test_every_route_is_described():
    assert set(described()["paths"]) == {one.path for one in ROUTES}


def test_it_is_served(server: Served):
    found = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    assert found["openapi"] == "3.1.0"
    assert found == described()


def make_sound(body: dict[str, Any], fields: Set[str]) -> None:
    """Change what a schema cannot say, so that some requests have an answer."""
    for name in ONE_IN_MANY:
        body.pop(name, None)
    body |= {"model": "micro-llama"} | dict.fromkeys({"max_tokens", "max_output_tokens"} & fields, 2)
    if fields >= {*INPUTS}:
        given = next((name for name in INPUTS if body.get(name)), None)
        body |= {"prompt": "Once"} if given is None else dict.fromkeys({*INPUTS} - {given})
    for message in body.get("messages") or ():
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "Once"


@pytest.mark.nightly_cases("/v1/chat/completions", "/v1/responses")
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_route_answers_as_described(server: Served, schema: Any, route: ApiRoute):
    import schemathesis  # which takes a second
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    operation = schema[route.path][route.method]
    statuses = set()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES if route.body else 2, derandomize=True, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and route.body is not None and issubclass(route.body, Body):
            make_sound(case.body, route.body.model_fields.keys())
        answer = case.call(base_url=server.url)
        statuses.add(answer.status_code)
        case.validate_response(
            answer, checks=[not_a_server_error, status_code_conformance, response_schema_conformance]
        )

    run()
    assert 200 in statuses


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

    with raw_served(Guard(app, key=KEY)) as running:
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
