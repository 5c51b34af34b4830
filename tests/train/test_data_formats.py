"""The formats of a row: told apart by their keys, and what each of them says."""

import json
import re
from contextlib import suppress

import pytest

from llorch.errors import FormatError
from llorch.train.batch import IGNORED
from llorch.train.data.formats import Chat, Completion, Instruction, Parsed, Text, Tokens, format_of, parse, unused_keys
from llorch.train.data.read import Record

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def record(**values: object) -> Record:
    return Record(values, "d/train.jsonl:7", "train.jsonl:7")


def row(**values: object) -> Parsed:
    return parse(record(**values), format_of(record(**values)))


def chat(**values: object) -> Chat:
    found = row(**values)
    assert isinstance(found, Chat)
    return found


def test_plain_rows():
    assert row(text="t") == Text("t")
    assert row(prompt="p", completion="c") == Completion("p", "c")
    assert row(input_ids=[1, 2]) == Tokens([1, 2], None)
    assert row(input_ids=[1, 2], labels=[IGNORED, 2], attention_mask=[1, 1]) == Tokens([1, 2], [IGNORED, 2])


@pytest.mark.parametrize("mask", [[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
def test_padding_of_token_ids_is_left_out_on_either_side(mask: list[int]):
    ids = [one * (place + 5) for place, one in enumerate(mask)]
    tokens = [one for one in ids if one]
    assert row(input_ids=ids, attention_mask=mask) == Tokens(tokens, None)
    assert row(input_ids=ids, labels=ids, attention_mask=mask) == Tokens(tokens, tokens)


def test_messages_learn_every_turn_of_the_assistant_unless_its_weight_is_0():
    turns = [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}, USER, ASSISTANT | {"weight": None}]
    found = chat(messages=turns)
    assert found.learned == [3, 5]
    assert found.messages == [USER, ASSISTANT] * 3
    assert found.tools is None


def test_calls_of_tools_are_brought_into_one_form():
    want = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for call in ({"name": "f", "arguments": {"x": 1}}, {"function": {"name": "f", "arguments": '{"x": 1}'}}, want):
        found = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}], tools=[{"a": 1}])
        assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [want]}
        assert found.tools == [{"a": 1}]
    call = {"id": "7", "type": "function", "function": {"name": "f"}}
    found = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}], tools='[{"a": 1}]')
    assert found.messages[1]["tool_calls"] == [want | {"id": "7", "function": {"name": "f", "arguments": {}}}]
    assert found.tools == [{"a": 1}]


def test_share_gpt_is_a_conversation():
    turns = [
        ("human", "q"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "r"),
        ("gpt", "a"),
    ]
    found = chat(conversations=[{"from": who, "value": text} for who, text in turns], system="s", tools="[]")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert found == Chat(
        [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r"},
            ASSISTANT,
        ],
        None,
        [2, 4],
    )


def test_alpaca_is_a_conversation_and_a_prompt_for_models_without_a_template():
    found = row(instruction="i", input="x", output="o")
    assert isinstance(found, Instruction)
    assert found.chat == Chat([{"role": "user", "content": "i\nx"}, {"role": "assistant", "content": "o"}], None, [1])
    assert found.plain is not None
    assert found.plain.completion == "o"
    assert found.plain.prompt.endswith("\n\n### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n")
    short = row(instruction="i", input="", output="o")
    assert isinstance(short, Instruction)
    assert short.plain is not None
    assert short.plain.prompt.endswith("request.\n\n### Instruction:\ni\n\n### Response:\n")


def test_alpaca_with_a_history_needs_a_template():
    found = row(instruction="i", input=None, output="o", system="s", history=[["q", "a"]])
    assert isinstance(found, Instruction)
    assert found.plain is None
    assert [m["content"] for m in found.chat.messages] == ["s", "q", "a", "i", "o"]
    assert found.chat.learned == [2, 4]


def test_a_prompt_of_messages_is_given_and_its_completion_learned():
    found = chat(prompt=[USER, ASSISTANT, USER], completion=[ASSISTANT])
    assert found == Chat([USER, ASSISTANT, USER, ASSISTANT], None, [3])


def test_the_alpaca_data_set_is_not_taken_for_text():
    values = {"instruction": "i", "input": "", "output": "o", "text": "...", "id": 3, "extra": None}
    assert format_of(record(**values)) == "Alpaca"
    assert unused_keys(record(**values), "Alpaca") == {"text", "id"}


BAD: dict[str, tuple[dict[str, object], str]] = {
    "no key": ({}, "Unsupported: keys of a row: expected one of: input_ids; messages;"),
    "unknown keys": ({"chosen": "a", "rejected": "b"}, "got chosen, rejected"),
    "half": ({"prompt": "a"}, "got prompt"),
    "null": ({"text": None}, "got none"),
    "text": ({"text": 3}, "Malformed: text: expected a string, got 3"),
    "completion": ({"prompt": "a", "completion": ["b"]}, "Malformed: completion: expected a string, got ['b']"),
    "ids": ({"input_ids": []}, "Malformed: input_ids: expected a list of integers, not empty, got []"),
    "mask length": (
        {"input_ids": [1], "attention_mask": [1, 1]},
        "Shape: attention_mask: expected as many as input_ids, 1, got 2",
    ),
    "mask value": (
        {"input_ids": [1, 2], "attention_mask": [1, 2]},
        "OutOfRange: attention_mask[1]: expected 0 or 1, got 2",
    ),
    "mask of nothing": ({"input_ids": [1], "attention_mask": [0]}, "Missing: attention_mask: expected a 1"),
    "mask with a hole": (
        {"input_ids": [1, 2, 3, 4], "attention_mask": [0, 1, 0, 1]},
        "Unsupported: attention_mask[2]: expected 1: padding stands before or behind all tokens, got 0",
    ),
    "bool id": ({"input_ids": [1, True]}, "Malformed: input_ids: expected a list of integers"),
    "float id": ({"input_ids": [1.0]}, "Malformed: input_ids: expected a list of integers"),
    "length": ({"input_ids": [1], "labels": [1, 2]}, "Shape: labels: expected as many as input_ids, 1, got 2"),
    "label": (
        {"input_ids": [1, 2], "labels": [1, 3]},
        "Inconsistent: labels[1]: expected -100 or the id there, 2, got 3",
    ),
    "messages": ({"messages": {}}, "Malformed: messages: expected a list of messages, got {}"),
    "no message": ({"messages": []}, "Malformed: messages: expected a list of messages, got []"),
    "message": ({"messages": ["a"]}, "Malformed: messages[0]: expected an object with role and content, got 'a'"),
    "role": (
        {"messages": [USER, {"role": "bot", "content": ""}]},
        "Unsupported: messages[1].role: expected one of system",
    ),
    "role list": ({"messages": [{"role": ["user"], "content": ""}]}, "Unsupported: messages[0].role"),
    "content": ({"messages": [{"role": "user"}]}, "Malformed: messages[0].content: expected a text, got None"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "Malformed: messages[0].content: expected a text",
    ),
    "weight": ({"messages": [ASSISTANT | {"weight": 2}]}, "OutOfRange: messages[0].weight: expected 0 or 1, got 2"),
    "weight list": (
        {"messages": [ASSISTANT | {"weight": []}]},
        "OutOfRange: messages[0].weight: expected 0 or 1, got []",
    ),
    "reasoning": ({"messages": [ASSISTANT | {"reasoning_content": 3}]}, "Malformed: messages[0].reasoning_content"),
    "calls": (
        {"messages": [USER | {"tool_calls": []}]},
        "Malformed: messages[0].tool_calls: expected a list, in a turn",
    ),
    "call": ({"messages": [ASSISTANT | {"tool_calls": [{"name": 1}]}]}, "messages[0].tool_calls[0]: expected a call"),
    "arguments": (
        {"messages": [ASSISTANT | {"tool_calls": [{"name": "f", "arguments": "{x"}]}]},
        "messages[0].tool_calls[0].arguments: expected an object, or the JSON text of one, got '{x'",
    ),
    "tools": ({"messages": [ASSISTANT], "tools": "x"}, "Malformed: tools: expected a list of objects, got 'x'"),
    "turns": ({"conversations": "x"}, "Malformed: conversations: expected a list, got 'x'"),
    "turn": ({"conversations": [3]}, "Malformed: conversations[0]: expected an object with from and value, got 3"),
    "speaker": (
        {"conversations": [{"from": "cat", "value": ""}]},
        "Unsupported: conversations[0].from: expected one of",
    ),
    "value": (
        {"conversations": [{"from": "gpt", "value": 3}]},
        "Malformed: conversations[0].value: expected a text, got 3",
    ),
    "function": (
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "Malformed: conversations[0].value: expected a call",
    ),
    "history": (
        {"instruction": "i", "output": "o", "history": "x"},
        "Malformed: history: expected a list of pairs, got 'x'",
    ),
    "pair": (
        {"instruction": "i", "output": "o", "history": [["x"]]},
        "Malformed: history[0]: expected a list of two texts",
    ),
    "output": ({"instruction": "i", "output": 1}, "Malformed: output: expected a string, got 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_row_must_not_say_is_refused_with_file_and_line(name: str):
    values, message = BAD[name]
    with pytest.raises(FormatError, match=re.escape("d/train.jsonl:7: ") + ".*" + re.escape(message)):
        row(**values)


def test_a_value_of_any_json_type_is_read_or_refused():
    wrong = (None, True, 3, 1.5, "x", [], [3], ["x"], [[]], [{}], {}, {"a": 1}, [{"role": 1}], [{"from": None}])
    keys = ("text", "prompt", "completion", "messages", "tools", "conversations", "instruction", "output", "input",
            "history", "system", "input_ids", "labels")  # fmt: skip
    good: dict[str, object] = {"instruction": "i", "output": "o"}
    for key in keys:
        for value in wrong:
            for values in ({key: value}, good | {key: value}, {"messages": [ASSISTANT], key: value}):
                values = json.loads(json.dumps(values))
                with suppress(FormatError):  # and nothing else
                    row(**values)
