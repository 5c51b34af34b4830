"""Chat templates that a server renders for its clients: what they cost and refuse is the affair of one request."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from builders.chat_models import LLAMA_3, chat_model
from helpers.refusals import assert_tells
from helpers.served import Served, served

WRITES = "{% for i in range(30) %}{{ 'a b' * 12000 }}{% endfor %}"  # 1.08 MB


def asked(server: Served, content: str = "Once") -> Any:
    return server.client.chat.completions.create(
        model="story", messages=[{"role": "user", "content": content}], max_tokens=2
    )


def refused(folder: Path, template: str) -> openai.BadRequestError:
    with served(chat_model(folder / "story", "story", template)) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            asked(server)
        server.client.completions.create(model="story", prompt="Once", max_tokens=2)
    return caught.value


@pytest.mark.slow_cases(but=["attribute", "text"])
@pytest.mark.parametrize(
    ("template", "facts"),
    [
        ("{% if %}", ["template of story", "read"]),
        ("{{ ''.__class__.__mro__ }}", ["template of story", "'__class__'"]),
        ("{{ 'a' * 2000000000 }}", ["template of story", "512 MiB"]),
        (WRITES, ["messages", 1080000, 1048576]),
        # what ends an answer is asked with a conversation of our own
        ("{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}a", ["story", ": no;"]),
    ],
    ids=["broken", "attribute", "memory", "text", "raised"],
)
def test_template_error_reaches_one_request_without_its_path(tmp_path: Path, template: str, facts: list[object]):
    error = refused(tmp_path, template)
    assert_tells(error.message, *facts)
    assert error.param == "messages"
    assert str(tmp_path) not in error.message


@pytest.mark.slow
def test_nobody_else_waits_for_a_template_that_takes_its_time(tmp_path: Path):
    with served(chat_model(tmp_path / "story", "story", LLAMA_3)) as server:
        enough = threading.Event()
        server.service.writing.submit(enough.wait, 20)  # as a template would hold it up
        body = {"model": "story", "messages": [{"role": "user", "content": "Once"}]}
        requests = (
            lambda: asked(server),
            lambda: server.client.responses.create(model="story", input="Once", max_output_tokens=2),
            lambda: server.client.post("/trace", body=body, cast_to=object),
        )
        chats = [threading.Thread(target=request) for request in requests]
        for chat in chats:
            chat.start()
        try:
            assert server.client.completions.create(model="story", prompt="Once", max_tokens=99, timeout=10).choices
            assert all(chat.is_alive() for chat in chats)
        finally:
            enough.set()
            for chat in chats:
                chat.join(20)


def test_a_request_sets_variables_of_the_template(tmp_path: Path):
    template = "{% if loud is defined and loud %}{{ 'LOUD ' * 20 }}{% endif %}{{ messages[0].content }}"
    with served(chat_model(tmp_path / "story", "story", template)) as server:

        def n_prompt(**variables: object) -> int:
            extra = {"chat_template_kwargs": variables} if variables else {}
            answer = server.client.chat.completions.create(
                model="story", messages=[{"role": "user", "content": "Once"}], max_tokens=1, extra_body=extra
            )
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        assert n_prompt(loud=True) > n_prompt() == n_prompt(loud=False)


def test_a_message_without_words_is_refused_with_a_template_as_without_one(tmp_path: Path):
    with served(chat_model(tmp_path / "story", "story", LLAMA_3)) as server:
        for messages in ([{"role": "user", "content": None}], [{"role": "user"}]):
            with pytest.raises(openai.BadRequestError) as caught:
                server.client.chat.completions.create(model="story", messages=messages)  # type: ignore[arg-type]
            assert caught.value.param == "messages.0.content"


def test_refusal_of_an_assistant_is_its_turn(tmp_path: Path):
    with served(chat_model(tmp_path / "story", "story", LLAMA_3)) as server:

        def n_prompt(turn: dict[str, Any]) -> int:
            messages: Any = [{"role": "user", "content": "Once"}, turn, {"role": "user", "content": "again"}]
            actual = server.client.chat.completions.create(model="story", messages=messages, max_tokens=1)
            assert actual.usage is not None
            return actual.usage.prompt_tokens

        wanted = n_prompt({"role": "assistant", "content": "No, I will not."})
        parts = [{"type": "refusal", "refusal": "No, "}, {"type": "text", "text": "I will not."}]
        assert n_prompt({"role": "assistant", "content": parts}) == wanted
        assert n_prompt({"role": "assistant", "content": None, "refusal": "No, I will not."}) == wanted


CALLER = "{% for m in messages %}{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }} {% endfor %}"
HISTORY = [  # of a client that sends back whatever it got
    {"role": "user", "content": "Once", "name": "Ann"},
    {"role": "assistant", "content": "a fox", "reasoning_content": "hm", "annotations": [], "thinking": None},
    {"role": "user", "content": "again", "foo": 1},
]


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (None, ["0.name", "1.reasoning_content", "2.foo"]),
        (LLAMA_3, ["0.name", "1.reasoning_content", "2.foo"]),
        (CALLER, ["1.reasoning_content", "2.foo"]),
    ],
    ids=["no template", "llama 3", "writes names"],
)
def test_keys_of_messages_that_a_model_does_not_read_are_named(tmp_path: Path, template: str | None, names: list[str]):
    with served(chat_model(tmp_path / "story", "story", template)) as server:

        def ignored(path: str, field: str, messages: list[dict[str, Any]], **fields: Any) -> list[str]:
            body = {"model": "story", field: messages, **fields}
            answer = httpx.post(server.url + path, json=body, trust_env=False)
            assert answer.status_code == 200, answer.text
            return answer.headers.get("x-llorch-ignored", "").split(", ")

        messages = [f"messages.{name}" for name in names]
        assert ignored("/v1/chat/completions", "messages", HISTORY, max_tokens=1) == messages
        assert ignored("/v1/chat/completions", "messages", HISTORY, max_tokens=1, stream=True, user="me") == [
            "user", *messages
        ]  # fmt: skip
        assert ignored("/v1/trace", "messages", HISTORY) == messages
        newer = [one | {"id": "msg_1", "status": "completed"} for one in HISTORY]
        found = ignored("/v1/responses", "input", newer, max_output_tokens=1, instructions="Be brief.")
        assert found == [f"input.{name}" for name in names]


@pytest.mark.parametrize("template", [None, LLAMA_3], ids=["no template", "llama 3"])
def test_a_message_with_an_image_or_with_too_many_keys_is_refused(tmp_path: Path, template: str | None):
    with served(chat_model(tmp_path / "story", "story", template)) as server:
        for more, facts in (
            ({"images": ["aGk="]}, ["messages[0].images"]),
            ({"audio": {"id": "a"}}, ["messages[0].audio"]),
            ({f"k{i}": 1 for i in range(17)}, ["messages", 16, 17]),
        ):
            body = {"model": "story", "messages": [{"role": "user", "content": "Once", **more}], "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False)
            assert answer.status_code == 400
            assert_tells(answer.json()["error"]["message"], *facts)


SWITCHED = (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ messages[0].content }}"
)
EFFORTS = "{% if reasoning_effort is defined %}{{ reasoning_effort }} effort, {% endif %}{{ messages[0].content }}"
ALWAYS = "{{ messages[0].content }}<think>"
NEVER = "{{ messages[0].content }}"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.mark.slow_cases(but=["template1-*", "template10-*", "template13-*", "template6-*"])
@pytest.mark.parametrize(
    ("template", "asked", "variables"),
    [  # variables: those that say the same; None: refused
        (SWITCHED, {"enable_thinking": False}, OFF),
        (SWITCHED, {"enable_thinking": True}, ON),
        (SWITCHED, {"think": False}, OFF),
        (SWITCHED, {"think": True}, ON),
        (SWITCHED, {"reasoning_effort": "none"}, OFF),
        (SWITCHED, {"think": False, "reasoning_effort": "none", "enable_thinking": False}, OFF),
        (SWITCHED, {"think": False, "chat_template_kwargs": OFF}, OFF),
        (SWITCHED, {"think": False, "chat_template_kwargs": ON}, None),
        (SWITCHED, {"think": False, "enable_thinking": True}, None),
        (SWITCHED, {"reasoning_effort": "high"}, None),
        (SWITCHED, {"think": "low"}, None),
        (EFFORTS, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (EFFORTS, {"think": "low"}, {"reasoning_effort": "low"}),
        (EFFORTS, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (EFFORTS, {"think": True}, None),
        (ALWAYS, {"think": False}, None),
        (ALWAYS, {"reasoning_effort": "none"}, None),
        (NEVER, {"enable_thinking": False}, {}),
        (NEVER, {"think": False, "reasoning_effort": "none"}, {}),
        (NEVER, {"think": True}, None),
        (NEVER, {"reasoning_effort": "low"}, None),
    ],
)
def test_thoughts_are_switched_by_any_name_or_the_name_is_refused(
    thinking: dict[str, Served], template: str, asked: dict[str, Any], variables: dict[str, Any] | None
):
    server = thinking[template]
    chat = {"model": "story", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 1}
    actual = httpx.post(f"{server.url}/v1/chat/completions", json=chat | asked, trust_env=False)
    effort = asked.get("reasoning_effort")
    other = {name: value for name, value in asked.items() if name != "reasoning_effort"}
    response = {"model": "story", "input": "Once", "max_output_tokens": 1, **other}
    response |= {} if effort is None else {"reasoning": {"effort": effort}}
    newer = httpx.post(f"{server.url}/v1/responses", json=response, trust_env=False)
    if variables is None:
        assert (actual.status_code, newer.status_code) == (400, 400)
        assert actual.json()["error"]["param"] in asked
        assert newer.json()["error"]["param"] in ("reasoning.effort", *other)
    else:
        same = chat | {"chat_template_kwargs": variables}
        expected = httpx.post(f"{server.url}/v1/chat/completions", json=same, trust_env=False).json()["usage"]
        assert actual.json()["usage"]["prompt_tokens"] == expected["prompt_tokens"]
        assert newer.json()["usage"]["input_tokens"] == expected["prompt_tokens"]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Servers of models with these templates."""
    with ExitStack() as stack:
        yield {
            template: stack.enter_context(
                served(chat_model(tmp_path_factory.mktemp("model") / "story", "story", template))
            )
            for template in (SWITCHED, EFFORTS, ALWAYS, NEVER)
        }


def test_the_templates_of_those_tests_write_other_prompts(thinking: dict[str, Served]):
    def n_prompt(template: str, **variables: object) -> int:
        messages: list[dict[str, object]] = [{"role": "user", "content": "Once"}]
        return len(thinking[template].service.chat_ids(messages, variables=variables))

    assert n_prompt(SWITCHED, enable_thinking=False) > n_prompt(SWITCHED) == n_prompt(SWITCHED, enable_thinking=True)
    assert n_prompt(EFFORTS, reasoning_effort="high") > n_prompt(EFFORTS)
