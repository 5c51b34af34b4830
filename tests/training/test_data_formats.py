"""The formats of a row: told apart by their keys, and what each of them says."""

import json
from typing import Any

import pytest
from helpers.refusals import Refusal, assert_tells, refuses, row

from llorch.runtime.errors import FormatError
from llorch.training.batch import IGNORED
from llorch.training.data.formats import (
    Chat,
    Instruction,
    LearnedTokens,
    Parsed,
    PromptCompletion,
    Text,
    format_of,
    parse,
    unused_keys,
)
from llorch.training.data.read import Record

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def record(**values: object) -> Record:
    return Record(values, "d/train.jsonl:7", "train.jsonl:7")


def parsed(**values: object) -> Parsed:
    return parse(record(**values), format_of(record(**values)))


def chat(**values: object) -> Chat:
    found = parsed(**values)
    assert isinstance(found, Chat)
    return found


def test_plain_rows():
    assert parsed(text="t") == Text("t")
    assert parsed(prompt="p", completion="c") == PromptCompletion("p", "c")
    assert parsed(input_ids=[1, 2]) == LearnedTokens([1, 2], None)
    assert parsed(input_ids=[1, 2], labels=[IGNORED, 2], attention_mask=[1, 1]) == LearnedTokens([1, 2], [IGNORED, 2])


@pytest.mark.parametrize("mask", [[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
def test_padding_of_token_ids_is_left_out_on_either_side(mask: list[int]):
    ids = [one * (place + 5) for place, one in enumerate(mask)]
    tokens = [one for one in ids if one]
    assert parsed(input_ids=ids, attention_mask=mask) == LearnedTokens(tokens, None)
    assert parsed(input_ids=ids, labels=ids, attention_mask=mask) == LearnedTokens(tokens, tokens)


def test_messages_learn_every_turn_of_the_assistant_unless_its_weight_is_0():
    turns = [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}, USER, ASSISTANT | {"weight": None}]
    found = chat(messages=turns)
    assert found.learned == [3, 5]
    assert found.messages == [USER, ASSISTANT] * 3
    assert found.tools is None


def test_calls_of_tools_are_brought_into_one_form():
    expected = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for call in ({"name": "f", "arguments": {"x": 1}}, {"function": {"name": "f", "arguments": '{"x": 1}'}}, expected):
        found = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}], tools=[{"a": 1}])
        assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [expected]}
        assert found.tools == [{"a": 1}]
    call = {"id": "7", "type": "function", "function": {"name": "f"}}
    found = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}], tools='[{"a": 1}]')
    assert found.messages[1]["tool_calls"] == [expected | {"id": "7", "function": {"name": "f", "arguments": {}}}]
    assert found.tools == [{"a": 1}]


@pytest.mark.parametrize("arguments", ["", " \n", None, "{}", {}])
def test_a_call_without_arguments_may_be_written_in_every_usual_way(arguments: object):
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": arguments}}
    found = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert found.messages[1]["tool_calls"] == [call | {"function": {"name": "f", "arguments": {}}}]


def test_share_gpt_is_a_conversation():
    text = '{"name": "f", "arguments": {"x": 1}}'
    turns = [("human", "q"), ("function_call", text), ("observation", "r"), ("gpt", "a")]
    found = chat(conversations=[{"from": who, "value": text} for who, text in turns], system="s", tools="[]")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    system, result = {"role": "system", "content": "s"}, {"role": "tool", "content": "r"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert found == Chat([system, USER, called, result, ASSISTANT], None, [2, 4])


def test_alpaca_is_a_conversation_and_a_prompt_for_models_without_a_template():
    found = parsed(instruction="i", input="x", output="o")
    assert isinstance(found, Instruction)
    assert found.chat == Chat([{"role": "user", "content": "i\nx"}, {"role": "assistant", "content": "o"}], None, [1])
    assert found.plain is not None
    assert found.plain.completion == "o"
    assert found.plain.prompt.endswith("\n\n### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n")
    short = parsed(instruction="i", input="", output="o")
    assert isinstance(short, Instruction)
    assert short.plain is not None
    assert short.plain.prompt.endswith("request.\n\n### Instruction:\ni\n\n### Response:\n")


def test_alpaca_with_a_history_needs_a_template():
    found = parsed(instruction="i", input=None, output="o", system="s", history=[["q", "a"]])
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


def bad(name: str, values: dict[str, object], code: str, place: str, expected: object = (), actual: object = ()) -> Any:
    places = ("d/train.jsonl:7: ", f"{place}:") if place else "d/train.jsonl:7: "
    return row(name, lambda: parsed(**values), code, where=places, expected=expected, got=actual)


INPUT_IDS, MASK = "input_ids", "attention_mask"
ROLES = ("system", "developer", "user", "assistant", "tool")
PAIR: dict[str, object] = {"instruction": "i", "output": "o"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
KWARGS = "chat_template_kwargs"
BAD_CALL: dict[str, object] = {"messages": [ASSISTANT | {"tool_calls": [{"name": "f", "arguments": "{x"}]}]}
HOLE: dict[str, object] = {INPUT_IDS: [1, 2, 3, 4], MASK: [0, 1, 0, 1]}
BAD = [
    bad("no key", {}, "Unsupported", "", (INPUT_IDS, "messages"), "none"),
    bad("unknown keys", {"poem": "a", "rhyme": "b"}, "Unsupported", "", INPUT_IDS, "poem, rhyme"),
    bad("half", {"prompt": "a"}, "Unsupported", "", INPUT_IDS, "prompt"),
    bad("null", {"text": None}, "Unsupported", "", INPUT_IDS, "none"),
    bad("text", {"text": 3}, "Malformed", "text", "string", 3),
    bad("completion", {"prompt": "a", "completion": ["b"]}, "Malformed", "completion", "string", ["b"]),
    bad("ids", {INPUT_IDS: []}, "Malformed", INPUT_IDS, "integers", []),
    bad("mask length", {INPUT_IDS: [1], MASK: [1, 1]}, "Shape", MASK, (INPUT_IDS, 1), 2),
    bad("mask value", {INPUT_IDS: [1, 2], MASK: [1, 2]}, "OutOfRange", f"{MASK}[1]", (0, 1), 2),
    bad("mask of nothing", {INPUT_IDS: [1], MASK: [0]}, "Missing", MASK, 1),
    bad("mask with a hole", HOLE, "Unsupported", f"{MASK}[2]", 1, 0),
    bad("bool id", {INPUT_IDS: [1, True]}, "Malformed", INPUT_IDS, "integers"),
    bad("float id", {INPUT_IDS: [1.0]}, "Malformed", INPUT_IDS, "integers"),
    bad("length", {INPUT_IDS: [1], "labels": [1, 2]}, "Shape", "labels", (INPUT_IDS, 1), 2),
    bad("label", {INPUT_IDS: [1, 2], "labels": [1, 3]}, "Inconsistent", "labels[1]", (-100, 2), 3),
    bad("messages", {"messages": {}}, "Malformed", "messages", "list", {}),
    bad("no message", {"messages": []}, "Malformed", "messages", "list", []),
    bad("message", {"messages": ["a"]}, "Malformed", "messages[0]", ("role", "content"), "'a'"),
    bad("role", {"messages": [USER, {"role": "bot", "content": ""}]}, "Unsupported",
        "messages[1].role", ROLES, "'bot'"),
    bad("role list", {"messages": [{"role": ["user"], "content": ""}]}, "Unsupported", "messages[0].role", ROLES),
    bad("content", {"messages": [{"role": "user"}]}, "Malformed", "messages[0].content", "text", None),
    bad("parts", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "Malformed",
        "messages[0].content[0].text", "text", None),
    bad("weight", {"messages": [ASSISTANT | {"weight": 2}]}, "OutOfRange", "messages[0].weight", (0, 1), 2),
    bad("weight list", {"messages": [ASSISTANT | {"weight": []}]}, "OutOfRange", "messages[0].weight", (0, 1), []),
    bad("reasoning", {"messages": [ASSISTANT | {"reasoning_content": 3}]}, "Malformed",
        "messages[0].reasoning_content", "text", 3),
    bad("calls", {"messages": [USER | {"tool_calls": []}]}, "Malformed", "messages[0].tool_calls", "list"),
    bad("call", {"messages": [ASSISTANT | {"tool_calls": [{"name": 1}]}]}, "Malformed", "messages[0].tool_calls[0]"),
    bad("list of arguments", {"messages": [ASSISTANT | {"tool_calls": [{"name": "f", "arguments": []}]}]},
        "Malformed", "messages[0].tool_calls[0].arguments", "object", "[]"),
    bad("arguments", BAD_CALL, "Malformed", "messages[0].tool_calls[0].arguments", ("object", "JSON"), "'{x'"),
    bad("tools", {"messages": [ASSISTANT], "tools": "x"}, "Malformed", "tools", "objects", "'x'"),
    bad("turns", {"conversations": "x"}, "Malformed", "conversations", "list", "'x'"),
    bad("turn", {"conversations": [3]}, "Malformed", "conversations[0]", ("from", "value"), 3),
    bad("speaker", {"conversations": [{"from": "cat", "value": ""}]}, "Unsupported", "conversations[0].from", "gpt"),
    bad("value", {"conversations": [{"from": "gpt", "value": 3}]}, "Malformed", "conversations[0].value", "text", 3),
    bad("function", {"conversations": [{"from": "function_call", "value": "f()"}]}, "Malformed",
        "conversations[0].value", "call"),
    bad("history", PAIR | {"history": "x"}, "Malformed", "history", "pairs", "'x'"),
    bad("pair", PAIR | {"history": [["x"]]}, "Malformed", "history[0]", "texts"),
    bad("output", {"instruction": "i", "output": 1}, "Malformed", "output", "string", 1),
    bad("train", {"messages": [ASSISTANT | {"train": 0}]}, "Malformed", "messages[0].train", ("true", "false"), 0),
    bad("train of a user", {"messages": [USER | {"training": True}]}, "Unsupported", "messages[0].training", "false"),
    bad("part of a turn", {"messages": [ASSISTANT | {"train_detail": [1]}]}, "Unsupported", "messages[0].train_detail"),
    bad("image", {"messages": [USER | {"content": [IMAGE]}]}, "Unsupported", "messages[0].content[0].type", "text",
        "'image_url'"),
    bad("image in a ShareGPT call", {"conversations": [{"from": "gpt", "value": [IMAGE]}]}, "Malformed",
        "conversations[0].value", "text"),
    bad("variables", {"messages": [ASSISTANT], KWARGS: [1]}, "Malformed", KWARGS, "object", [1]),
    bad("reserved", {"messages": [ASSISTANT], KWARGS: {"tools": 1}}, "Unsupported", KWARGS, "messages", "'tools'"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", BAD)
def test_what_a_row_must_not_say_is_refused_with_file_and_line(refusal: Refusal):
    refusal.check()


PROMPTED: dict[str, Any] = {"prompt": "p", "completion": "c"}
TALK: dict[str, object] = {"messages": [USER, ASSISTANT]}
SHARED: dict[str, object] = {"conversations": [{"from": "human", "value": "q"}]}
PREFERENCES: dict[str, dict[str, Any]] = {  # rows of TRL, LLaMA-Factory, Axolotl and OpenAI, and the key to name
    "label": PROMPTED | {"label": False},  # KTO
    "label 1": {"label": 1, **TALK},
    "chosen": {"prompt": "p", "chosen": "c", "rejected": "r"},
    "rejected": {"chosen": [ASSISTANT], "rejected": [ASSISTANT]},
    "score_chosen": TALK | {"score_chosen": 1.0},
    "chosen-rating": {"text": "t", "chosen-rating": 4.0},
    "completions": {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
    "kto_tag": SHARED | {"kto_tag": True},
    "chosen_response": {"question": "q", "chosen_response": "c", "rejected_response": "r"},
    "preferred_output": {"input": TALK, "preferred_output": [ASSISTANT], "non_preferred_output": [ASSISTANT]},
    "score": PAIR | {"score": 0.1},
    "messages[1].reward": {"messages": [USER, ASSISTANT | {"reward": -1.0}]},
    "completion[0].rating": {"prompt": [USER], "completion": [ASSISTANT | {"rating": 1}]},
    "conversations[0].rating": {"conversations": [{"from": "gpt", "value": "a", "rating": 1}]},
    "images": TALK | {"images": ["a.png"]},
    "messages[0].images": {"messages": [USER | {"images": ["a.png"]}, ASSISTANT]},
    "prompt[0].audio": {"prompt": [USER | {"audio": "a.wav"}], "completion": [ASSISTANT]},
    "conversations[0].image": {"conversations": [{"from": "human", "value": "q", "image": "a.png"}]},
}


@pytest.mark.parametrize("key", PREFERENCES)
def test_preference_rows_are_refused_with_the_name_of_the_key(key: str):
    with refuses("Unsupported", where=("d/train.jsonl:7: ", key)):
        parsed(**PREFERENCES[key])


def test_labels_of_plain_text_and_empty_images_are_no_judgement():
    assert parsed(text="t", label=0) == Text("t")
    assert chat(images=[], **TALK).learned == [1]


def test_axolotl_turns_excluded_from_training_are_masked():
    found = chat(messages=[USER, ASSISTANT | {"train": False}, USER, ASSISTANT | {"training": True}, USER, ASSISTANT])
    assert (found.learned, found.messages) == ([3, 5], [USER, ASSISTANT] * 3)
    found = chat(
        conversations=[{"from": "human", "value": "q", "id": 7}, {"from": "gpt", "value": "a", "train": False}]
    )
    assert (found.learned, found.messages) == ([], [USER | {"id": 7}, ASSISTANT])


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]
    assert chat(messages=[USER | {"content": parts}, ASSISTANT]).messages[0]["content"] == "q!"


@pytest.mark.parametrize("row_values", [TALK, SHARED, PAIR, {"prompt": [USER], "completion": [ASSISTANT]}])
def test_variables_of_a_row_are_read(row_values: dict[str, object]):
    for given in ({"a": False}, '{"a": false}'):
        found = parsed(**row_values, chat_template_kwargs=given)
        assert (found.chat if isinstance(found, Instruction) else found).variables == {"a": False}  # type: ignore[union-attr]
        assert unused_keys(record(**row_values, chat_template_kwargs=given), format_of(record(**row_values))) == set()


def is_sound(parsed_row: Parsed) -> bool:
    """Tell if a parsed row has the types of its class, down to the texts of the turns."""
    if isinstance(parsed_row, Instruction):
        return is_sound(parsed_row.chat) and (parsed_row.plain is None or is_sound(parsed_row.plain))
    if isinstance(parsed_row, Chat):
        texts = [turn[key] for turn in parsed_row.messages for key in ("role", "content")]
        return all(isinstance(text, str) for text in texts) and all(
            0 <= at < len(texts) // 2 for at in parsed_row.learned
        )
    if isinstance(parsed_row, LearnedTokens):
        return all(type(one) is int for one in (*parsed_row.ids, *(parsed_row.labels or ())))
    return all(isinstance(text, str) for text in vars(parsed_row).values())


def test_a_value_of_any_json_type_is_read_as_what_it_is_or_refused_with_file_and_line():
    wrong = (None, True, 3, 1.5, "x", [], [3], ["x"], [[]], [{}], {}, {"a": 1}, [{"role": 1}], [{"from": None}],
             [1.5], [True], [["x", 1]])  # fmt: skip
    keys = ("text", "prompt", "completion", "messages", "tools", "conversations", "instruction", "output", "input",
            "history", "system", "input_ids", "labels", "label", "score", "images", KWARGS)  # fmt: skip
    good: dict[str, object] = {"instruction": "i", "output": "o"}
    found, n_refused = list[Parsed](), 0
    for key in keys:
        for value in wrong:
            for values in ({key: value}, good | {key: value}, {"messages": [ASSISTANT], key: value}):
                values = json.loads(json.dumps(values))
                try:
                    found.append(parsed(**values))
                except FormatError as error:  # and nothing else
                    n_refused += 1
                    assert_tells(str(error), where="d/train.jsonl:7")
    assert all(map(is_sound, found))
    assert {type(each) for each in found} == {Text, Chat, Instruction, LearnedTokens}  # a completion takes two keys
    assert n_refused > len(keys) * len(wrong)
