"""Bodies that are wrong: each is refused with 400 and the name of the field, and nothing runs."""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx2 as httpx
import pytest
from helpers.served import Served
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as CompletionCreateParams

from llorch.apps.serve.requests import Body
from llorch.apps.serve.unsupported_fields import ignored_fields

CHAT, COMPLETION, RESPONSE, TRACE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/trace"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "story", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    COMPLETION: {"model": "story", "prompt": "Hi", "max_tokens": 1},
    RESPONSE: {"model": "story", "input": "Hi", "max_output_tokens": 1},
    TRACE: {"model": "story", "prompt": "Hi"},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
SAMPLING: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, 1e-9, "1", True, [1]],
    "top_p": [0, -1, 1.1, "0.5", True],
    "top_k": [-2, 1.5, "40", True, 1 << 40],
    "min_p": [-0.1, 1, "0"],
    "repetition_penalty": [0, 1e4, "1"],
    "presence_penalty": [-2.1, 2.1, "1"],
    "frequency_penalty": [-3, 3, [], {}],
    "seed": [-2, 1 << 63, 1.5, "7", True],
}
ANSWERS: dict[str, list[Any]] = {
    "n": [0, 9, -1, 1.5, "2", True, 10**20],
    "max_tokens": [0, -2, 1.5, "16", True, 10**15],
    "stop": ["", 5, [""], ["a"] * 17, [1], {}, "x" * 2000],
    "stream": ["true", 1, []],
    "stream_options": [True, [], "include_usage"],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function"}],
    "logit_bias": [{"5": 1}, {"x": 1}, [1]],
    "best_of": [2],
    "echo": [True],
    "suffix": ["end"],
    "ignore_eos": [True],
    "grammar": ["root ::= 'a'"],
    "chat_template": ["{{ 'a' * 2000000000 }}"],
    "user": [5, True, ["me"], {"id": 1}],
    "metadata": ["x", [1], {"a": 1}, {"a": None}, {"a": "x" * 513}, {"a" * 65: "x"}, {str(n): "x" for n in range(17)}],
    "reasoning_effort": [1, True, "much", ["low"], {"effort": "low"}],
    "store": ["true", 1],
    "service_tier": [1, ["auto"]],
    "parallel_tool_calls": ["yes", 0],
    "verbosity": [1, "loud"],
    "prompt_cache_key": [1, {}],
    "safety_identifier": [1.5, []],
}
OF_ROUTE: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "messages": [[], "Hi", {}, None, [{"role": "user", "content": "Hi"}] * 5000],
        "max_completion_tokens": [0, -5, "3"],
        "logprobs": [1, "true", 5],
        "top_logprobs": [3, -1, 21, "3", 1.5],
        "functions": [[{"name": "f"}]],
        "function_call": [{"name": "f"}],
        "audio": [{"voice": "a"}],
        "modalities": [["text", "audio"], ["audio"]],
        "chat_template_kwargs": [[1], "x", {"messages": []}, {"strftime_now": 1}],
        "enable_thinking": ["false", 0],
        "think": ["yes", 1],
        "reasoning_effort": ["much", 3, False],
        "parse_special": [True],
        "response_format": [
            "json",
            {"type": "xml"},
            {},
            {"type": "json_schema"},
            {"type": "json_schema", "schema": True},
            {"type": "json_schema", "json_schema": {"name": "a"}},
            {"type": "text", "schema": {}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}, "schema": {"type": "object"}},
            {"type": "json_object", "json_schema": {"name": "a", "schema": {}}},
        ],
        "model": [None, 5, ["story"]],
    },
    COMPLETION: {
        "prompt": [None, 5, [], [[]], [-1], [1.5], ["a", 5], [[1, "a"]], ["a"] * 17, [1 << 40], [99999], {}],
        "logprobs": [-1, 21, True, "2"],
        "response_format": [{"type": "json_object"}],
        "enable_thinking": [False, True],
        "think": [False],
        "reasoning_effort": ["none"],
        "chat_template_kwargs": [{"enable_thinking": False}],
        "parse_special": ["false", 0],
        "add_special_tokens": ["no"],
        "model": [None, 5],
    },
    RESPONSE: {
        "input": [None, 5, [], [5], {}],
        "instructions": [5, []],
        "max_output_tokens": [0, "5", True],
        "previous_response_id": ["resp_1"],
        "tools": [[{"type": "web_search"}]],
        "background": [True],
        "include": [["message.input_image.image_url"]],
        "truncation": ["auto"],
        "stop": ["."],
        "n": [2],
        "text": ["json", 5, {"verbosity": "low"}, {"format": {"type": "text", "schema": {}}}],
        "reasoning": ["none", {"effort": "much"}],
        "chat_template_kwargs": [[1], {"messages": []}],
        "max_tokens": [5],
    },
    TRACE: {
        "prompt": [5, None],
        "arrays": ["embed", [5], ["x"] * 257],
        "tokens": [[], [-1], ["a"]],
        "messages": [[], "Hi"],
        "parse_special": [1],
        "think": [False],
    },
    "/tokenize": {"content": [None, 5, ["a"]], "add_special": ["yes", 1], "with_pieces": [0]},
    "/detokenize": {"tokens": [None, 5, "1", [-1], [1.5], ["a"], [99999]]},
}
BAD = [
    (route, field, value)
    for route, fields in OF_ROUTE.items()
    for field, values in {
        **(SAMPLING if route in (CHAT, COMPLETION, RESPONSE) else {}),
        **(ANSWERS if route in (CHAT, COMPLETION) else {}),
        **fields,
    }.items()
    for value in values
]
MESSAGES = [
    ({"role": "user"}, "messages.0.content"),
    ({"role": "user", "content": None}, "messages.0.content"),
    ({"role": "system", "content": None}, "messages.0.content"),
    ({"role": "tool", "content": None, "tool_call_id": "a"}, "messages.0.content"),
    ({"role": "assistant", "content": None}, "messages.0.content"),
    ({"role": "assistant", "content": None, "refusal": 5}, "messages.0.refusal"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}, "messages.0.content"),
    ({"content": "Hi"}, "messages.0.role"),
    ({"role": "robot", "content": "Hi"}, "messages.0.role"),
    ({"role": "user", "content": 5}, "messages.0.content"),
    ({"role": "user", "content": []}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0.type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content.0.text"),
    ("Hi", "messages.0"),
]


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_there_are_enough_of_them():
    assert len(BAD) >= 120


def test_what_they_are_made_from_is_good(http: httpx.Client):
    assert {route: http.post(route, json=body).status_code for route, body in GOOD.items()} == dict.fromkeys(GOOD, 200)


@pytest.mark.parametrize("route", GOOD)
def test_each_field_that_is_wrong_is_named(server: Served, http: httpx.Client, route: str):
    before = server.engine.metrics.text().count(b"llorch_answer_tokens_total 0")
    for _, field, value in [bad for bad in BAD if bad[0] == route]:
        answer = http.post(route, json=GOOD[route] | {field: value})
        assert answer.status_code == 400, (field, value)
        error = error_of(answer)
        assert str(error["param"]).split(".")[0] == field, (field, value, error)
        assert field in error["message"], (field, value, error)
        assert len(error["message"]) < 400
        assert error["type"] == "invalid_request_error"
    assert server.engine.metrics.text().count(b"llorch_answer_tokens_total 0") == before


@pytest.mark.parametrize(("message", "param"), MESSAGES)
def test_each_part_of_a_message_that_is_wrong_is_named(http: httpx.Client, message: object, param: str):
    answer = http.post(CHAT, json=GOOD[CHAT] | {"messages": [message]})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_a_response_takes_refusals_of_an_assistant_alone(http: httpx.Client, role: str):
    said = {"role": role, "content": [{"type": "refusal", "refusal": "No."}]}
    answer = http.post(RESPONSE, json=GOOD[RESPONSE] | {"input": [said, {"role": "user", "content": "Hi"}]})
    assert answer.status_code == (200 if role == "assistant" else 400)
    assert role == "assistant" or error_of(answer)["param"] == "input.0"


def test_a_field_that_has_to_be_there_is_named(http: httpx.Client):
    for route, field in ((CHAT, "messages"), (CHAT, "model"), (COMPLETION, "prompt"), (RESPONSE, "input")):
        answer = http.post(route, json={key: value for key, value in GOOD[route].items() if key != field})
        assert (answer.status_code, error_of(answer)["param"]) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b'{"model": NaN}', b'{"temperature": Infinity}',
        b'{"temperature": 1e999}', b'{"model": "a", "model": "b"}', b'{"model": "\\ud800"}', b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}", b'{"a": [' + b"1," * (1 << 20) + b"1]}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", [CHAT, "/tokenize"])
def test_body_that_is_no_json_object_is_refused(http: httpx.Client, route: str, body: bytes):
    answer = http.post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


def test_values_that_mean_nothing_are_taken(http: httpx.Client):
    nothing = {
        "tools": [], "tool_choice": "none", "logit_bias": {}, "n": 1, "stop": None, "best_of": 1, "echo": False,
        "modalities": ["text"], "response_format": {"type": "text"}, "stream_options": None, "user": None,
    }  # fmt: skip
    answer = http.post(CHAT, json=GOOD[CHAT] | nothing)
    assert answer.status_code == 200
    assert "x-llorch-ignored" not in answer.headers


def test_types_of_ignored_fields_are_those_of_openai(http: httpx.Client):
    hints = get_type_hints(CompletionCreateParams)
    values = [("service_tier", word) for word in _words_of(hints["service_tier"])]
    values += [("user", "me"), ("metadata", {"a": "b"}), ("store", True), ("parallel_tool_calls", False)]
    for name, value in values:
        assert {type(value), *map(type, value if isinstance(value, dict) else ())} <= {str, bool, dict}
        assert ignored_fields(Body.model_validate({"model": "story", name: value})) == [name]
    everything = dict(values)
    answer = http.post(CHAT, json=GOOD[CHAT] | everything)
    assert (answer.status_code, answer.headers["x-llorch-ignored"]) == (200, ", ".join(everything))


def _words_of(hint: object) -> list[str]:
    """List the texts that a type of OpenAI's package allows."""
    inner = [word for one in get_args(hint) for word in ([one] if isinstance(one, str) else _words_of(one))]
    return list(dict.fromkeys(inner))


def test_a_text_beyond_a_mebibyte_is_refused_before_it_is_tokenized(server: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(server.service.model.tokenizer), "encode", lambda *a, **k: pytest.fail("tokenized"))
    messages = [{"role": "user", "content": "a" * 600_000}] * 2
    for route, change in ((CHAT, {"messages": messages}), (COMPLETION, {"prompt": "é" * 600_000})):
        answer = httpx.post(server.url + route, json=GOOD[route] | change, trust_env=False)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "context_length_exceeded"


def test_an_error_holds_no_long_value(http: httpx.Client):
    secret = "word " * 1000
    answer = http.post(CHAT, json=GOOD[CHAT] | {"messages": secret})
    assert len(json.dumps(answer.json())) < 400
