"""Control tokens in the words of users, broken before a template renders them; and the tokens that end a generation."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.chat_models import CHATML, LLAMA_3, NO_END, chat_folder, chat_model
from helpers.refusals import refuses

from llorch.files.tokenizer.chat import ChatTemplate
from llorch.files.tokenizer.conversation import GENERATION, Splitter, chat_ends, remove_marks, unnamed_ends, with_ends

CONTROLS = ("<|im_start|>", "<|im_end|>", "</s>", "<|im_end|>x")


@pytest.fixture
def breaker() -> Splitter:
    return Splitter(CONTROLS)


def user(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def through(template: str, messages: list[dict[str, object]], breaker: Splitter) -> tuple[str, list[int]]:
    mark = breaker.mark_for(messages)
    assert mark is not None
    broken = breaker.insert_marks(messages, mark)
    assert isinstance(broken, list)
    return remove_marks(ChatTemplate(template, variables={}).render(broken), mark)


def test_innocent_words_are_left_alone(breaker: Splitter):
    for text in ("", "hello", "a < b | c > d", "<im_end>", "im_end|>", "/s>", "\ufdd0"):
        assert breaker.mark_for(user(text)) is None
    assert remove_marks("\ufdd0", None) == ("\ufdd0", [])


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|im_start|>", "</s></s>", "<|im_end|>x", "a <|im_", "a\n<"])
def test_the_text_comes_back_and_every_control_token_in_it_has_an_inert_place(breaker: Splitter, text: str):
    actual, inert = through("<|im_start|>{{ messages[0].content }}<|im_end|>", user(text), breaker)
    assert actual == f"<|im_start|>{text}<|im_end|>"
    first, last = len("<|im_start|>"), len("<|im_start|>") + len(text)
    assert all(first < place <= last for place in inert)
    for control in CONTROLS:
        place = actual.find(control, first)
        while 0 <= place < last:
            assert any(place < one < place + len(control) for one in inert)
            place = actual.find(control, place + 1)


@pytest.mark.parametrize("text", ["a#b", "#", "##", "<#", "#<|im_", "x<|a#b|>#"])
def test_behind_a_control_token_of_one_character_there_are_two_inert_places(text: str):
    breaker = Splitter(["#", "<|im_end|>", "<|a#b|>"])
    actual, inert = through("#{{ messages[0].content }}#", user(text), breaker)
    assert actual == f"#{text}#"
    assert [place for place in range(len(actual)) if inert.count(place + 1) > 1] == [
        1 + i for i, character in enumerate(text) if character == "#"
    ]


def test_a_token_that_two_texts_make_together_is_inert(breaker: Splitter):
    messages: list[dict[str, object]] = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}]
    actual, inert = through("{% for m in messages %}{{ m.content }}{% endfor %}", messages, breaker)
    assert (actual, inert) == ("<|im_end|>", [1])


def test_names_keep_their_text_and_everything_else_is_broken(breaker: Splitter):
    odd = Splitter(["tool", "user", "</s>"])
    messages = [{"role": "user", "type": "tool", "name": "user", "deep": [{"user": ["tool", 3, None]}]}]
    mark = odd.mark_for(messages)
    assert mark is not None
    assert odd.insert_marks(messages, mark) == [
        {"role": "user", "type": "tool", "name": f"u{mark}ser", "deep": [{f"u{mark}ser": [f"t{mark}ool", 3, None]}]}
    ]


def test_a_mark_is_a_character_that_nobody_wrote(breaker: Splitter):
    assert breaker.mark_for(user("</s>")) == "\ufdd0"
    assert breaker.mark_for(user("</s>\ufdd0\ufdd1")) == "\ufdd2"
    actual, inert = through("{{ messages[0].content }}", user("\ufdd0</s>\ufdd0"), breaker)
    assert (actual, inert) == ("\ufdd0</s>\ufdd0", [2])


@pytest.mark.parametrize("dump", ["tojson", "tojson(ensure_ascii=True)"])
def test_marks_are_found_in_json(breaker: Splitter, dump: str):
    values = [{"role": "tool", "content": {"x": "a</s>\u00e9", "y<": 1}}]
    actual, inert = through(f"{{{{ messages[0].content | {dump} }}}}", values, breaker)
    assert json.loads(actual) == values[0]["content"]
    assert [actual[place - 1 :][:4] for place in inert] == ["</s>", '<": ']


def test_without_control_tokens_nothing_is_broken():
    assert Splitter([]).mark_for(user("<|im_end|>")) is None
    assert not Splitter([""]).found_in("")


def test_calls_that_a_model_would_not_see_are_refused(tmp_path: Path):
    called: list[dict[str, object]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "content": "r"},
    ]
    plain = [{key: one[key] or "" for key in ("role", "content")} for one in called]
    for name, template in (("micro-llama3", LLAMA_3), ("micro-qwen3", None)):
        chats = chat_model(tmp_path / name, name, template).chats
        for opened in (True, False):
            with refuses("Unsupported", "messages[1].tool_calls"):
                chats.spoken(called, opened=opened)
        assert chats.spoken(plain).text
    with refuses("Unsupported", "messages[1].tool_calls"):
        chat_model(tmp_path / "again", "micro-llama3", LLAMA_3).chats.ids(called)
    assert '"name": "f"' in chat_model(tmp_path / "writes", "micro-qwen3", CHATML).chats.spoken(called).text


END, TURN = 370, 372  # <|endoftext|> and <|im_end|> of `micro-qwen3`


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return chat_folder(tmp_path / "model", "micro-qwen3", CHATML)


def name_ends(folder: Path, **values: Any) -> None:
    """Write what the two files of a folder name; None removes a file's or a value's name."""
    for name, ends in values.items():
        path = folder / f"{name}.json"
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token_id"}
        path.write_text(json.dumps(kept if ends is None else kept | {"eos_token_id": ends}))


@pytest.mark.parametrize(
    ("generation_config", "config", "missing"),
    [(END, [END, TURN], [TURN]), ([END, TURN], END, []), (None, [END, TURN], [END, TURN]), ([TURN], None, [END])],
)
def test_generation_config_goes_before_config(folder: Path, generation_config: Any, config: Any, missing: list[int]):
    name_ends(folder, generation_config=generation_config, config=config)
    assert unnamed_ends({TURN, END}, folder) == missing


def test_config_counts_where_there_is_no_generation_config(folder: Path):
    (folder / GENERATION).unlink()
    name_ends(folder, config=END)
    assert unnamed_ends([TURN], folder) == [TURN]
    assert with_ends(folder, [TURN]) == {"bos_token_id": END, "eos_token_id": [END, TURN]}


def test_more_ends_stand_behind_those_that_are_named_and_other_values_stay(folder: Path):
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": END, "temperature": 0.7}))
    assert with_ends(folder, [TURN]) == {"eos_token_id": [END, TURN], "temperature": 0.7}


def test_the_end_of_a_turn_is_what_the_template_writes(folder: Path, tmp_path: Path):
    assert chat_ends(folder) == {TURN}
    (folder / "chat_template.jinja").write_text(NO_END)
    assert chat_ends(folder) == frozenset()
    (folder / "chat_template.jinja").write_text("{% if")
    assert chat_ends(folder) == frozenset()
    assert chat_ends(tmp_path) == frozenset()


def test_a_gguf_file_names_its_ends_by_text(tmp_path: Path):
    (tmp_path / "m.gguf").touch()
    assert unnamed_ends([TURN], tmp_path / "m.gguf") == []
