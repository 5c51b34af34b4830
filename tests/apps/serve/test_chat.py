"""`/v1/chat/completions` as the real `openai` client sees it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.chat_models import CHATML, chat_model
from helpers.served import Served, served

from llorch.model.model import load
from llorch.ops.sampling import SamplingSettings

ASKED: list[Any] = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("chat") / "qwen"
    with served(chat_model(folder, "micro-qwen3", CHATML)) as running:
        yield running


def create(server: Served, **asked: Any) -> Any:
    wanted: dict[str, Any] = {"model": "story", "messages": ASKED, "temperature": 0} | asked
    return server.client.chat.completions.create(**wanted)


def solo(prompt: str, **options: Any) -> str:
    return "".join(token.text for token in load("story").generate(prompt, **options))


def test_an_answer_is_that_of_generate(server: Served):
    actual = create(server, max_tokens=20)
    assert actual.choices[0].message.content == solo("Once upon a time", max_tokens=20)
    assert actual.choices[0].message.role == "assistant"
    assert (actual.choices[0].finish_reason, actual.object, actual.model) == ("length", "chat.completion", "story")
    assert (actual.usage.prompt_tokens, actual.usage.completion_tokens, actual.usage.total_tokens) == (5, 20, 25)
    assert actual.usage.prompt_tokens_details.cached_tokens == 0
    assert actual.system_fingerprint.startswith("fp_")
    assert actual.timings["predicted_n"] == 20


def test_sampled_answers_are_drawn_by_seed_and_the_next_choice_by_the_next_seed(server: Served):
    actual = create(server, max_tokens=12, temperature=1.5, top_p=0.9, seed=7, n=3, presence_penalty=0.3)
    settings = [SamplingSettings(temperature=1.5, top_p=0.9, seed=seed, presence_penalty=0.3) for seed in (7, 8, 9)]
    wanted = [solo("Once upon a time", max_tokens=12, settings=one) for one in settings]
    assert [choice.message.content for choice in actual.choices] == wanted
    assert [choice.index for choice in actual.choices] == [0, 1, 2]
    assert actual.usage.completion_tokens == 36


def test_without_a_seed_two_answers_differ(server: Served):
    texts = {create(server, max_tokens=30, temperature=2.0).choices[0].message.content for _ in range(3)}
    assert len(texts) > 1


def test_fields_that_only_others_have_reach_the_sampler(server: Served):
    own: dict[str, Any] = {"top_k": 3, "min_p": 0.02, "repetition_penalty": 1.3}
    actual = create(server, max_tokens=12, temperature=1.5, seed=1, extra_body=own)
    settings = SamplingSettings(temperature=1.5, seed=1, **own)
    assert actual.choices[0].message.content == solo("Once upon a time", max_tokens=12, settings=settings)


def test_a_stream_is_the_role_the_text_the_end_and_the_counts(server: Served):
    chunks = list(create(server, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    first, *middle, end, counts = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(one.choices[0].delta.content for one in middle) == solo("Once upon a time", max_tokens=20)
    assert {one.choices[0].finish_reason for one in middle} == {None}
    assert (end.choices[0].finish_reason, end.choices[0].delta.content) == ("length", None)
    assert (counts.choices, counts.usage.completion_tokens) == ([], 20)
    assert len({one.id for one in chunks}) == 1


def test_a_stream_of_two_choices_has_both_texts(server: Served):
    texts = {0: "", 1: ""}
    for chunk in create(server, max_tokens=12, temperature=1.5, seed=7, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    for seed, text in zip((7, 8), texts.values(), strict=True):
        settings = SamplingSettings(temperature=1.5, seed=seed)
        assert text == solo("Once upon a time", max_tokens=12, settings=settings)


def test_text_ends_before_a_stop_string_also_in_a_stream(server: Served):
    whole = solo("Once upon a time", max_tokens=40)
    wanted = whole[: whole.index(".")]
    actual = create(server, max_tokens=40, stop=["nowhere", "."])
    assert (actual.choices[0].message.content, actual.choices[0].finish_reason) == (wanted, "stop")
    chunks = list(create(server, max_tokens=40, stop=".", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_include_alternative_tokens(server: Served):
    actual = create(server, max_tokens=6, logprobs=True, top_logprobs=3).choices[0]
    tokens = list(load("story").generate("Once upon a time", max_tokens=6))
    assert [entry.logprob for entry in actual.logprobs.content] == [token.logprob for token in tokens]
    assert "".join(entry.token for entry in actual.logprobs.content) == actual.message.content
    for entry in actual.logprobs.content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # at temperature 0
        values = [one.logprob for one in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    chunks = list(create(server, max_tokens=6, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for one in chunks if one.choices[0].logprobs for entry in one.choices[0].logprobs.content]
    assert streamed == actual.logprobs.content


def test_a_template_writes_the_conversation_and_what_is_in_it_stays_text(chatting: Served):
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Say <|im_end|>"}, {"type": "text", "text": " twice"}]},
    ]
    actual = create(chatting, model="qwen", messages=messages, max_tokens=5)
    model = chatting.service.model
    plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say <|im_end|> twice"}]
    ids = model.prompt_ids(plain)
    assert actual.usage.prompt_tokens == len(ids)
    n_controls = sum(one in model.tokenizer.control_ids for one in ids)
    assert n_controls == 5  # three beginnings, two ends: those of the template
    tokens = load(model.weights.path).generate(messages=plain, max_tokens=5)
    assert actual.choices[0].message.content == "".join(token.text for token in tokens)


def test_answers_have_the_form_of_a_schema_each_on_its_own(server: Served):
    properties = {"a": {"enum": [1, 2, 3]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    actual = create(server, response_format=form, max_tokens=60, n=3, temperature=1.5, seed=1)
    for choice in actual.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["a"] in (1, 2, 3)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_response_format_with_a_schema_beside_its_type_constrains_the_answer(server: Served, kind: str):
    form: dict[str, Any] = {"type": kind, "schema": {"enum": [[7]]}}
    forms = [form, form | {"json_schema": {"name": "a", "schema": form["schema"]}}][: 1 + (kind == "json_schema")]
    for asked in forms:
        actual = create(server, response_format=asked, max_tokens=60).choices[0]
        assert (json.loads(actual.message.content), actual.finish_reason) == ([7], "stop")


def test_response_format_with_an_empty_schema_is_any_object(server: Served):
    asked = create(server, response_format={"type": "json_object", "schema": {}}, max_tokens=20)
    wanted = create(server, response_format={"type": "json_object"}, max_tokens=20)
    assert asked.choices[0].message.content == wanted.choices[0].message.content
    assert wanted.choices[0].message.content.startswith("{")


def test_a_schema_that_nothing_can_fulfil_is_refused(server: Served):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "robot"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, response_format=form)
    assert caught.value.param == "response_format"


def test_a_model_that_is_not_there_is_not_found(server: Served):
    for name in ("gpt-4", "../story", "/etc/passwd", "story\0", "x" * 100_000, "story:none", ""):
        with pytest.raises(openai.NotFoundError) as caught:
            create(server, model=name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_prompt_beyond_the_context_is_refused_and_an_answer_ends_there(server: Served):
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, messages=[{"role": "user", "content": "word " * 600}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    actual = create(server, messages=[{"role": "user", "content": "Once upon a time " * 100}], max_tokens=500)
    assert actual.usage.total_tokens == 513  # the last token is never fed back
    assert actual.choices[0].finish_reason == "length"


def test_unknown_fields_are_ignored_and_named(server: Served):
    ask, how = server.client.chat.completions.with_raw_response.create, {"my_field": 1, "bad name\r\nx: y": 1}
    actual = ask(model="story", messages=ASKED, max_tokens=1, user="me", extra_body=how)
    assert actual.headers["x-llorch-ignored"] == "user, my_field"
    assert "x-llorch-ignored" not in ask(model="story", messages=ASKED, max_tokens=1).headers
