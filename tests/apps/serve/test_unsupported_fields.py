"""Fields that other servers take: each is obeyed, refused by name, or harmless and named in a header."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import httpx2 as httpx
import pytest
from builders.chat_models import chat_model
from helpers.served import served

from llorch.apps.serve.requests import Strict
from llorch.apps.serve.unsupported_fields import _NEUTRAL_VALUES, _REPLACEMENTS

CHAT, COMPLETION, RESPONSE, TRACE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/trace"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "story", "messages": [{"role": "user", "content": "Once"}], "temperature": 0},
    COMPLETION: {"model": "story", "prompt": "Once", "temperature": 0},
    RESPONSE: {"model": "story", "input": "Once", "temperature": 0},
}
Fate = Literal["obeyed", "refused", "nothing", "ignored"]  # nothing: the value asks for nothing
ROWS: tuple[tuple[str, Any, Fate], ...] = (
    # llama.cpp's server
    ("n_predict", 3, "obeyed"), ("n_predict", 0, "refused"), ("n_probs", 5, "refused"), ("n_probs", 0, "nothing"),
    ("repeat_penalty", 1.3, "refused"), ("repeat_penalty", 1.0, "nothing"), ("repeat_last_n", 64, "refused"),
    ("repeat_last_n", -1, "nothing"), ("typical_p", 0.9, "refused"), ("typical_p", 1.0, "nothing"),
    ("mirostat", 2, "refused"), ("mirostat", 0, "nothing"), ("mirostat_tau", 5.0, "ignored"),
    ("dynatemp_range", 0.5, "refused"), ("dynatemp_exponent", 1.0, "ignored"), ("dry_multiplier", 0.8, "refused"),
    ("dry_base", 1.75, "ignored"), ("xtc_probability", 0.5, "refused"), ("top_n_sigma", 1.0, "refused"),
    ("min_keep", 5, "refused"), ("samplers", ["top_k"], "refused"), ("n_indent", 4, "refused"),
    ("t_max_predict_ms", 100, "refused"), ("t_max_predict_ms", -1, "nothing"), ("penalize_nl", False, "refused"),
    ("response_fields", ["content"], "refused"), ("return_tokens", True, "refused"), ("n_cmpl", 2, "refused"),
    ("post_sampling_probs", True, "refused"), ("ignore_eos", True, "refused"), ("grammar", "root ::= [a]", "refused"),
    ("json_schema", {"type": "object"}, "refused"), ("lora", [{"id": 0, "scale": 0.5}], "refused"),
    ("reasoning_format", "deepseek", "refused"), ("reasoning_format", "none", "nothing"),
    ("thinking_budget_tokens", 100, "refused"), ("cache_prompt", True, "ignored"), ("id_slot", 1, "ignored"),
    ("n_keep", 4, "ignored"), ("n_cache_reuse", 256, "ignored"), ("timings_per_token", True, "ignored"),
    # Ollama
    ("num_predict", 3, "obeyed"), ("options", {"num_predict": 3}, "refused"), ("options", {}, "nothing"),
    ("format", "json", "refused"), ("format", {"type": "object"}, "refused"), ("format", "", "nothing"),
    ("template", "{{ .Prompt }}", "refused"), ("raw", True, "refused"), ("context", [1, 2], "refused"),
    ("images", ["aGk="], "refused"), ("tfs_z", 0.9, "refused"), ("penalize_newline", False, "refused"),
    ("keep_alive", "5m", "ignored"), ("num_ctx", 2048, "ignored"),
    # vLLM, SGLang
    ("min_tokens", 5, "refused"), ("min_tokens", 0, "nothing"), ("stop_token_ids", [5], "refused"),
    ("stop_token_ids", [], "nothing"), ("include_stop_str_in_output", True, "refused"), ("bad_words", ["a"], "refused"),
    ("allowed_token_ids", [5], "refused"), ("truncate_prompt_tokens", 5, "refused"), ("prompt_logprobs", 1, "refused"),
    ("skip_special_tokens", False, "refused"), ("skip_special_tokens", True, "nothing"), ("best_of", 2, "refused"),
    ("guided_json", {"type": "object"}, "refused"), ("guided_choice", ["a"], "refused"),
    ("structured_outputs", {"regex": "a"}, "refused"), ("return_token_ids", True, "refused"),
    ("use_beam_search", True, "refused"), ("length_penalty", 2.0, "refused"), ("repetition_detection", {}, "refused"),
    ("include_reasoning", False, "refused"), ("add_generation_prompt", False, "refused"), ("regex", "a+", "refused"),
    ("continue_final_message", True, "refused"), ("documents", [{"title": "a", "text": "b"}], "refused"),
    ("no_stop_trim", True, "refused"), ("priority", 1, "ignored"), ("cache_salt", "x", "ignored"),
    ("lora_path", "pirate", "refused"), ("custom_logit_processor", "x", "refused"),
    # TGI
    ("max_new_tokens", 3, "obeyed"), ("parameters", {"max_new_tokens": 3}, "refused"), ("inputs", "Hi", "refused"),
    ("do_sample", False, "refused"), ("do_sample", True, "nothing"), ("watermark", True, "refused"),
    ("return_full_text", True, "refused"), ("details", True, "refused"), ("truncate", 5, "refused"),
    ("top_n_tokens", 3, "refused"), ("adapter_id", "pirate", "refused"), ("guideline", "Be kind.", "refused"),
    # text-generation-webui, KoboldCpp
    ("max_length", 3, "refused"), ("rep_pen", 1.1, "refused"), ("no_repeat_ngram_size", 3, "refused"),
    ("custom_token_bans", "5", "refused"), ("guidance_scale", 1.5, "refused"), ("top_a", 0.2, "refused"),
    ("stopping_strings", ["a"], "refused"), ("stop_sequence", ["a"], "refused"), ("ban_eos_token", True, "refused"),
    # OpenAI
    ("tool_choice", "auto", "nothing"), ("tool_choice", "required", "refused"), ("tools", [], "nothing"),
    ("tools", [{"type": "function"}], "refused"), ("function_call", "auto", "nothing"),
    ("logit_bias", {"5": 1}, "refused"), ("audio", {"voice": "a"}, "refused"),
    ("modalities", ["text", "audio"], "refused"), ("verbosity", "low", "refused"),
    ("web_search_options", {}, "refused"), ("user", "me", "ignored"), ("store", True, "ignored"),
    ("metadata", {"a": "b"}, "ignored"), ("service_tier", "auto", "ignored"), ("parallel_tool_calls", True, "ignored"),
    ("prediction", {"type": "content", "content": "a"}, "ignored"), ("safety_identifier", "me", "ignored"),
)  # fmt: skip
CONTEXT = 40
N = 4  # tokens of an answer
LIMITS = [(name, value) for name, value, fate in ROWS if fate == "obeyed"]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served(context=CONTEXT) as running, httpx.Client(base_url=running.url, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def base_texts(http: httpx.Client) -> dict[str, str]:
    """The answers of N tokens that nothing was added to."""
    return {route: text(http.post(route, json=body | token_limit(route, N)).json()) for route, body in ASKED.items()}


def token_limit(route: str, n: int) -> dict[str, int]:
    return {"max_output_tokens" if route == RESPONSE else "max_tokens": n}


def text(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.nightly_cases("/v1/completions")
@pytest.mark.parametrize("route", ASKED)
def test_each_unsupported_field_has_its_documented_effect(http: httpx.Client, base_texts: dict[str, str], route: str):
    for name, value, fate in ROWS:
        body = ASKED[route] | {name: value}
        if fate == "refused" or (fate == "obeyed" and route == RESPONSE):  # which has max_output_tokens alone
            answer = http.post(route, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), (name, value)
            assert name in answer.json()["error"]["message"]
        elif fate == "obeyed":
            assert http.post(route, json=body).json()["usage"]["completion_tokens"] == value, name
    for fate in ("nothing", "ignored"):
        names = {name: value for name, value, of_row in ROWS if of_row == fate}
        answer = http.post(route, json=ASKED[route] | token_limit(route, N) | names)
        assert (answer.status_code, text(answer.json())) == (200, base_texts[route]), answer.text
        named = answer.headers.get("x-llorch-ignored", "").split(", ")
        assert named == (list(names) if fate == "ignored" else [""])


@pytest.mark.slow_cases(but=["max_completion_tokens", "n_predict"])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", *(name for name, _ in LIMITS)])
def test_a_limit_of_minus_one_is_the_context(http: httpx.Client, name: str):
    for route in (CHAT, COMPLETION) if name != "max_completion_tokens" else (CHAT,):
        usage = http.post(route, json=ASKED[route] | {name: -1}).json()["usage"]
        assert usage["completion_tokens"] > 16  # of a completion without a limit
        assert usage["total_tokens"] == CONTEXT + 1  # the last token is never fed back


def test_two_limits_are_the_same_or_refused(http: httpx.Client):
    for name in ("max_completion_tokens", *(name for name, _ in LIMITS)):
        same, other = (http.post(CHAT, json=ASKED[CHAT] | {"max_tokens": 3, name: value}) for value in (3, 4))
        assert (same.status_code, same.json()["usage"]["completion_tokens"]) == (200, 3)
        assert (other.status_code, other.json()["error"]["param"] in ("max_tokens", name)) == (400, True)


@pytest.mark.parametrize("route", ASKED)
def test_minus_one_is_off_for_top_k_and_any_seed(http: httpx.Client, base_texts: dict[str, str], route: str):
    answer = http.post(route, json=ASKED[route] | token_limit(route, N) | {"top_k": -1, "seed": -1})
    assert (answer.status_code, text(answer.json())) == (200, base_texts[route])
    body = ASKED[route] | token_limit(route, 24) | {"temperature": 2, "top_k": -1}
    assert len({text(http.post(route, json=body | {"seed": -1}).json()) for _ in range(3)}) > 1
    seeded = [text(http.post(route, json=body | {"seed": 7} | how).json()) for how in ({}, {"top_k": 0}, {"top_k": 2})]
    assert seeded[0] == seeded[1] != seeded[2]


def test_what_to_use_instead_is_a_field_of_the_route(http: httpx.Client):
    fields = {name for path in ASKED for name in schema(http, path)}
    for name, instead in _REPLACEMENTS.items():
        assert name in _NEUTRAL_VALUES
        assert not instead.isidentifier() or instead in fields, instead
    for name, value, route, told in (
        ("n_predict", 3, RESPONSE, "max_output_tokens"), ("format", "json", CHAT, "response_format"),
        ("repeat_penalty", 1.3, COMPLETION, "repetition_penalty"), ("n_probs", 3, CHAT, "logprobs"),
    ):  # fmt: skip
        assert told in http.post(route, json=ASKED[route] | {name: value}).json()["error"]["message"]
    for route in (COMPLETION, RESPONSE):  # which have no response_format
        refusal = http.post(route, json=ASKED[route] | {"format": "json"})
        assert "response_format" not in refusal.json()["error"]["message"]


PARTS = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b", "foo": 1}]
ANSWER = {"type": "output_text", "text": "c", "annotations": [], "logprobs": []}  # of llorch, as it comes back
SCHEMA = {"type": "object", "properties": {}}
NAMED = {"name": "a", "schema": SCHEMA}
NESTED: tuple[tuple[str, dict[str, Any], str], ...] = (  # what the header names; with "!", the field that is refused
    (CHAT, {"stream_options": {"include_usage": True, "include_obfuscation": False}},
     "stream_options.include_obfuscation"),
    (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "!stream_options.continuous_usage_stats"),
    (COMPLETION, {"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    (CHAT, {"messages": [{"role": "user", "content": PARTS}] * 2},
     "messages.0.content.0.cache_control, messages.0.content.1.foo"),
    (TRACE, {"messages": [{"role": "user", "content": PARTS}], "prompt": None},
     "messages.0.content.0.cache_control, messages.0.content.1.foo"),
    (CHAT, {"messages": [{"role": "user", "content": [PARTS[1] | {"images": ["aGk="]}]}]},
     "!messages.0.content.0.images"),
    (CHAT, {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "a", "foo": 1}]}]},
     "messages.0.content.0.foo"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]}, "messages.0.refusal"),
    (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "foo": {}}]}]},
     "input.0.content.0.foo"),
    (RESPONSE, {"input": [{"role": "assistant", "id": "a", "status": "completed", "content": [ANSWER]}]}, ""),
    (CHAT, {"response_format": {"type": "json_object", "nam": "a"}}, "response_format.nam"),
    (CHAT, {"response_format": {"type": "json_object", "value": SCHEMA}}, "!response_format.value"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED | {"description": "b"}}},
     "response_format.json_schema.description"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schemas": SCHEMA}}},
     "!response_format.json_schema.schema"),
    (RESPONSE, {"text": {"formatt": {"type": "json_object"}}}, "text.formatt"),
    (RESPONSE, {"text": {"format": {"type": "json_object", "foo": 1}}}, "text.format.foo"),
    (RESPONSE, {"text": {"format": {"type": "json_object", "json_schema": SCHEMA}}}, "!text.format.json_schema"),
    (RESPONSE, {"reasoning": {"effort": None, "summary": "auto"}}, "reasoning.summary"),
    (RESPONSE, {"reasoning": {"max_tokens": 5}}, "!reasoning.max_tokens"),
    (CHAT, {"chat_template_kwargs": {"enable_thinkin": False, "foo": None}}, "chat_template_kwargs.enable_thinkin"),
    (RESPONSE, {"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo"),
    (TRACE, {"messages": [{"role": "user", "content": "a"}], "prompt": None, "parse_special": True}, "!parse_special"),
)  # fmt: skip


def test_nested_fields_are_named_by_their_path_or_refused(http: httpx.Client):
    for route, more, fate in NESTED:
        body = {"model": "story", "prompt": "a"} if route == TRACE else ASKED[route] | token_limit(route, 1)
        answer = http.post(route, json=body | more)
        if fate.startswith("!"):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, fate[1:]), more
        else:
            assert (answer.status_code, answer.headers.get("x-llorch-ignored", "")) == (200, fate), (more, answer.text)


def test_models_of_requests_remember_fields_that_they_do_not_declare():
    kinds = [Strict]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 20
    assert {kind.model_config.get("extra") for kind in kinds} == {"allow"}


def test_fields_of_tool_calls_that_no_template_gets_are_named(tmp_path: Path):
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{{ m.function_call or '' }}{% endfor %}"
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "strict": True}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": {"name": "f", "foo": 1}}
    with served(chat_model(tmp_path / "story", "story", template)) as running:
        body = {"model": "story", "messages": [message], "max_tokens": 1}
        answer = httpx.post(running.url + CHAT, json=body, trust_env=False)
    names = ["tool_calls.0.index", "tool_calls.0.function.strict", "function_call.foo"]
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-llorch-ignored"].split(", ") == [f"messages.0.{name}" for name in names]


def schema(http: httpx.Client, path: str) -> dict[str, Any]:
    described = http.get("/openapi.json").json()
    ref = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return described["components"]["schemas"][ref.rpartition("/")[2]]["properties"]


def test_the_rows_have_every_fate():
    assert {fate for _, _, fate in ROWS} == set(get_args(Fate))
