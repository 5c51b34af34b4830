"""Chat templates: rendered as transformers renders them, in a sandbox."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import pytest
from builders.hostile_templates import COSTS, ESCAPES
from builders.vocabularies import real_vocabulary
from helpers.refusals import assert_tells, refuses

from llorch.files.tokenizer.chat import ChatTemplate, TemplateSettings
from llorch.files.tokenizer.template_process import TemplateLimits, TemplateProcess
from llorch.runtime.errors import FormatError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "\u00e9 <b>", "parameters": {"type": "object"}}}
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say the weather.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}  # fmt: skip
ASK = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
USER, ASSISTANT = MESSAGES
SYSTEM = {"role": "system", "content": "Be brief."}
PUBLISHED_CHATS: dict[str, tuple[list[Any], list[Any] | None, bool, dict[str, Any]]] = {
    "user": ([USER], None, True, {}),
    "system": ([SYSTEM, USER], None, True, {}),
    "turns": ([SYSTEM, USER, ASSISTANT, USER], None, True, {}),
    "last turn the assistant's": ([USER, ASSISTANT], None, False, {}),
    "empty": ([USER | {"content": ""}, ASSISTANT | {"content": ""}, USER], None, True, {}),
    "tools": ([SYSTEM, USER], [WEATHER], True, {}),
    "tool call": (
        [
            USER,
            ASSISTANT | {"content": "", "tool_calls": [ASK]},
            {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "sunny"},
        ],
        [WEATHER], True, {},
    ),
    "thinking": ([USER, ASSISTANT | {"reasoning_content": "hm"}, USER], None, True, {"enable_thinking": False}),
    "thinking in the text": ([USER, ASSISTANT | {"content": "<think>\nhm\n</think>\n\nyes"}, USER], None, True, {}),
    "spaces and scripts": (
        [USER | {"content": " \u4f60\n"}, ASSISTANT | {"content": "\n\nSo \U0001f98a "}, USER], None, True, {},
    ),
}  # fmt: skip


def rendered(source: str, messages: Sequence[dict[str, Any]] = (), **variables: str) -> str:
    return ChatTemplate(source, variables=variables).render(messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ x }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}",
            "<s>user: Hi\nassistant: Yes\n",
        ),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # blocks leave no blank lines
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", "Hi"),
        ("{{ 'name' in messages[0] }}", "False"),  # keys without a value are absent
    ],
)
def test_a_conversation_becomes_text(source: str, expected: str):
    assert rendered(source, [MESSAGES[0] | {"name": None}, MESSAGES[1]], x="<s>") == expected


def test_the_opening_of_a_turn_is_written_when_asked_for():
    template = ChatTemplate("x{% if add_generation_prompt %}>{% endif %}", variables={})
    assert (template.render([]), template.render([], add_generation_prompt=True)) == ("x", "x>")


def test_json_keeps_letters_and_brackets():
    assert ChatTemplate("{{ tools | tojson }}", variables={}).render([], tools=TOOLS).count("\u00e9 <b>") == 1


def test_a_template_can_refuse():
    with refuses("TemplateError", "roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__init__.__globals__ }}", "{{ 'x'.format_map.__self__ }}{{ ''.__class__.x }}",
        "{{ messages[3].role }}", "{{ 1 // 0 }}", "{{ messages + 1 }}", "{% for x in 7 %}{% endfor %}",
    ],
)  # fmt: skip
def test_forbidden_operation_is_an_error_of_the_template(source: str):  # hostile ones are tried below
    template = ChatTemplate(source, variables={})
    with refuses("TemplateError", "chat template"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", ["{% for", "{{ x", "{% nothing %}", "{% generation %}x", "{{ x | no_filter }}"])
def test_invalid_template_is_refused(source: str):
    with refuses("TemplateError", "chat template"):
        ChatTemplate(source, variables={})


def test_a_conversation_that_json_cannot_say_is_refused():
    with refuses("TemplateError", "chat template", "JSON"):
        rendered("x", [{"role": "user", "content": object()}])


def test_an_error_is_one_line_with_the_file_and_what_to_do():
    def line(source: str) -> str:
        with pytest.raises(FormatError) as caught:
            ChatTemplate(source, variables={}, path="model.gguf").render([])
        return str(caught.value)

    refused, unread = line("{{ raise_exception('no\n!') }}"), line("{{ x }")
    assert_tells(refused, "TemplateError", "model.gguf", "no\\n!", "correct", "template", "conversation")
    assert_tells(unread, "TemplateError", "model.gguf", "'}'", "correct", "template", "conversation")
    stopped = line("{{ 'a' * 2000000000 }}")
    assert_tells(stopped, "TemplateBudget", "model.gguf", "512 MiB", "conversation", "chat_template.jinja")
    assert not any("\n" in said for said in (refused, unread, stopped))


def test_a_template_writes_the_date_that_it_is_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", variables={})
    assert template.render([], settings=TemplateSettings(time=datetime(2024, 2, 29))) == "29 Feb 2024 00:00"
    before, written, after = datetime.now(), template.render([]), datetime.now()
    assert before.replace(second=0, microsecond=0) <= datetime.strptime(written, "%d %b %Y %H:%M") <= after


def test_variables_reach_a_template_and_none_replaces_the_conversation():
    template = ChatTemplate("{{ x }}{{ messages[0].content }}", variables={"x": "of the tokenizer"})
    assert template.render(MESSAGES, settings=TemplateSettings({"x": [1, {"a": None}]})) == "[1, {'a': None}]Hi"
    with refuses(ValueError, "chat_template_kwargs", expected="tools", got="'messages'"):
        TemplateSettings({"messages": []})


@pytest.mark.nightly_cases(but=["spaces and scripts"])
@pytest.mark.weights
@pytest.mark.live
@pytest.mark.parametrize("shape", PUBLISHED_CHATS)
def test_templates_of_published_models_render_as_in_transformers(shape: str):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, tools, opened, variables = PUBLISHED_CHATS[shape]
    files = sorted((real_vocabulary("qwen2").parent / "templates").glob("*.jinja"))
    assert len(files) >= 70
    texts = {"bos_token": "<bos>", "eos_token": "<eos>"}
    counts = Counter[str]()
    for file in files:
        source = file.read_text()
        how: Any = {"tools": tools, "add_generation_prompt": opened}
        try:
            expected = render_jinja_template([messages], chat_template=source, **how, **texts, **variables)[0][0]
        except Exception:  # a template raises what it likes
            with refuses("TemplateError"):
                ChatTemplate(source, variables=texts).render(messages, settings=TemplateSettings(variables), **how)
            counts["both refuse"] += 1
            continue
        actual = ChatTemplate(source, variables=texts).render(messages, settings=TemplateSettings(variables), **how)
        assert actual == expected, file.name
        counts["equal"] += 1
    print(f"{shape}: {dict(counts)}")
    assert counts["equal"] > counts["both refuse"]


CHAT = [{"role": "user", "content": "Hi"}]
NAMED = (
    "text times two billion", "text doubled", "center", "wide format", "power",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("two loops", "slice", "lipsum")),
)  # fmt: skip


@pytest.fixture(scope="module")
def patient() -> Iterator[TemplateProcess]:
    """A process whose time suits a busy machine, for what is not about time."""
    process = TemplateProcess(TemplateLimits(seconds=30.0))
    yield process
    process.stop()


@pytest.fixture(scope="module")
def hasty() -> Iterator[TemplateProcess]:
    """A process with little time, so that these tests do not take a second each."""
    process = TemplateProcess(TemplateLimits(seconds=0.05))
    yield process
    process.stop()


def greeting() -> str:
    return ChatTemplate("{{ messages[0].content }}!", variables={}).render(CHAT)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reaches_nothing_but_its_data(name: str):
    with refuses("TemplateError", "chat template"):
        ChatTemplate(ESCAPES[name], variables={}).render(CHAT)
    assert greeting() == "Hi!"


@pytest.mark.slow_cases(but=["ljust", "precision", "replace", "text times a million, often", "wide format", "zfill"])
@pytest.mark.parametrize("name", COSTS)
def test_a_template_that_costs_too_much_is_stopped(name: str, hasty: TemplateProcess, patient: TemplateProcess):
    assert patient.ask({"source": COSTS[name]}) == {"text": ""}  # compiling it computes nothing
    assert hasty.ask({"source": COSTS[name], "variables": {"messages": CHAT}})["code"] == "TemplateBudget"


@pytest.mark.nightly_cases(but=["text times two billion", "wide format"])
@pytest.mark.parametrize("name", NAMED)
def test_the_limits_of_real_use_are_kept(name: str):
    assert greeting() == "Hi!"
    with refuses("TemplateBudget", "chat template") as caught:
        ChatTemplate(COSTS[name], variables={}).render(CHAT)
    assert any(limit in str(caught.value) for limit in (" 1 s", " 512 MiB", " 4194304 "))
    assert greeting() == "Hi!"


@pytest.mark.parametrize(("count", "answer"), [(4 << 20, "text"), ((4 << 20) + 1, "code")])
def test_a_text_may_have_four_million_characters(count: int, answer: str, patient: TemplateProcess):
    found = patient.ask({"source": "{{ '\U0001f98a' * n }}", "variables": {"n": count}})
    assert (answer in found, found.get("text", "")) == (True, "\U0001f98a" * (count if answer == "text" else 0))
