"""`x-request-id`: every answer and refusal has one, the client's own where that can be said again."""

import re
from typing import Any

import pytest
from fakes.raw_http import answer, ask, connect, request, served

from llorch.ops.sampling import SamplingSettings

pytest.importorskip("uvicorn", reason="NOT RUN: uvicorn is not installed")

NEW = re.compile(r"req_[0-9a-f]{24}")


async def fine(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def port():
    from llorch.apps.serve.connection import ClientLimits
    from llorch.apps.serve.guard import Guard

    limits = ClientLimits(header_seconds=0.3, body_seconds=0.3, header_bytes=2000)
    with served(Guard(fine, key="k3y", max_body=10), limits=limits) as running:
        yield running.port


KEY: dict[str, Any] = {"authorization": "Bearer k3y"}
ASKED = {  # status, and the request
    "answer": (200, request(**KEY)),
    "key": (401, request()),
    "host": (403, request(host="evil.example")),
    "origin": (403, request(origin="null")),
    "body too large": (413, request("POST", "/", b"x" * 11, **KEY)),
}


@pytest.mark.parametrize("case", ASKED)
def test_every_answer_has_a_new_id_or_the_id_of_the_client(port: int, case: str):
    wanted, data = ASKED[case]
    given = data.replace(b"\r\n\r\n", b"\r\nx-request-id: my.id-7\r\n\r\n", 1)
    found = [ask(port, each) for each in (data, data, given)]
    assert [status for status, _, _ in found] == [wanted] * 3
    first, second, own = [headers["x-request-id"] for _, headers, _ in found]
    assert NEW.fullmatch(first)
    assert NEW.fullmatch(second)
    assert first != second
    assert own == "my.id-7"


@pytest.mark.parametrize(
    ("status", "data"), [(408, b"GET / HTTP/1.1\r\n"), (400, b"NONSENSE\r\n\r\n"), (431, request(x_long="y" * 3000))]
)
def test_unreadable_request_gets_an_id(port: int, status: int, data: bytes):
    actual = ask(port, data)
    assert (actual[0], bool(NEW.fullmatch(actual[1]["x-request-id"]))) == (status, True)


def test_late_body_keeps_the_id_of_its_client(port: int):
    with connect(port, request("POST", content_length="5", x_request_id="mine", **KEY) + b"x") as client:
        status, headers, _ = answer(client)
    assert (status, headers["x-request-id"]) == (408, "mine")


def test_connection_keeps_no_id_for_the_next_request(port: int):
    with connect(port, request(x_request_id="first", **KEY)) as client:
        assert answer(client)[1]["x-request-id"] == "first"
        client.sendall(request(**KEY))
        assert NEW.fullmatch(answer(client)[1]["x-request-id"])
        client.sendall(b"GET /")  # no more of it
        status, headers, _ = answer(client)
    assert (status, bool(NEW.fullmatch(headers["x-request-id"]))) == (408, True)


@pytest.mark.parametrize("request_id", ["", "a b", "a\tb", "x" * 129, "a,b", 'a"b', "<a>", "\u00e9", "a;b"])
def test_harmful_id_is_replaced(port: int, request_id: str):
    assert NEW.fullmatch(ask(port, request(x_request_id=request_id, **KEY))[1]["x-request-id"])


@pytest.mark.parametrize("request_id", ["x" * 128, "0", "f47ac10b-58cc-4372-a567-0e02b2c3d479", "a/b+c=d:e@f~g_h"])
def test_common_id_is_kept(port: int, request_id: str):
    assert ask(port, request(x_request_id=request_id, **KEY))[1]["x-request-id"] == request_id


def test_two_ids_count_as_none(port: int):
    twice = request(**KEY).replace(b"\r\n\r\n", b"\r\nx-request-id: a\r\nx-request-id: b\r\n\r\n")
    assert NEW.fullmatch(ask(port, twice)[1]["x-request-id"])


pytest.importorskip("starlette", reason="NOT RUN: starlette is not installed")

CONTEXT = 64  # below that of the model, so that the server alone cuts an answer


@pytest.fixture(scope="module")
def service() -> Any:
    from llorch.apps.serve.engine import Engine
    from llorch.apps.serve.scheduler import Turns
    from llorch.apps.serve.service import Service
    from llorch.model.model import load

    model = load("story")
    assert model.config.max_position_embeddings > CONTEXT
    return Service(model, Engine(Turns(model, n_jobs=1), n_jobs=1), context=CONTEXT, timeout=60, version="1")


def room(service, n_prompt: int, max_tokens: int | None) -> int:
    job = service.job([5] * n_prompt, SamplingSettings(), param="prompt", max_tokens=max_tokens, adapter=None)
    return job.max_tokens


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "expected"),
    [
        (CONTEXT - 4, None, 5),  # the last token of an answer is never fed back
        (CONTEXT - 4, 6, 5),
        (CONTEXT - 4, 5, 5),
        (CONTEXT - 4, 4, 4),
        (CONTEXT, None, 1),
        (1, 1000, CONTEXT),
    ],
)
def test_prompt_and_answer_fill_the_context_and_no_more(service, n_prompt: int, max_tokens: int | None, expected: int):
    assert room(service, n_prompt, max_tokens) == expected


def test_a_prompt_of_one_token_more_than_the_context_is_refused(service):
    from llorch.apps.serve.api_errors import ApiError

    with pytest.raises(ApiError) as caught:
        room(service, CONTEXT + 1, 1)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize("texts", [["x" * 10], ["x" * 4, "y" * 6], ["é" * 5], ["é" * 4, "yy"]])
def test_bytes_of_all_texts_of_a_request_are_added_up(monkeypatch: pytest.MonkeyPatch, texts: list[str]):
    from llorch.apps.serve import service
    from llorch.apps.serve.api_errors import ApiError

    monkeypatch.setattr(service, "MAX_TEXT", 10)
    service.require_short(*texts, param="messages")
    with pytest.raises(ApiError) as caught:
        service.require_short(*texts, "z", param="messages")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
