"""A conversation that goes on: what is remembered of it changes no answer, and what was made of one counts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_models import CHATML, LLAMA_3, chat_model
from builders.random_adapters import random_adapter
from helpers.refusals import refuses

from llorch import load_torch
from llorch.cli.chat_session import ChatSession
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.generate import Token
from llorch.model.model import Model, load
from llorch.ops.sampling import SamplingSettings

TURNS = ("Hello <|eot_id|> there", "And then the fox", "Why?")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Attention alone, and with delta nets."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "attention": chat_model(folder / "story", "story", LLAMA_3),
        "delta": chat_model(folder / "next", "micro-qwen3-next", CHATML),
    }


def talk(model: Model, **settings: float) -> ChatSession:
    return ChatSession(model, [], SamplingSettings(**settings), max_tokens=12)  # type: ignore[arg-type]


def text(tokens: Iterator[Token]) -> str:
    return "".join(token.text for token in tokens)


@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_every_answer_is_that_of_a_model_that_remembers_nothing(models: dict[str, Model], kind: str):
    one = talk(models[kind])
    for turn in TURNS:
        said = text(one.say(turn))
        assert said == text(models[kind].generate(messages=one.messages[:-1], max_tokens=12))
    changed: list[dict[str, object]] = [{"role": "user", "content": "Hello and goodbye"}]  # begins as the first one did
    actual = [token.logprob for token in one.answer(changed)]
    expected = [token.logprob for token in models[kind].generate(messages=changed, max_tokens=12)]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_what_both_turns_begin_with_is_computed_once(models: dict[str, Model]):
    one = talk(models["attention"])
    cached = []
    for turn in TURNS:
        before = len(one.ids()) if one.messages else 0
        text(one.say(turn))
        assert one.counted is not None
        cached.append(before - one.counted.n_cached)
    assert cached[0] == 0
    assert all(0 < rest < 5 for rest in cached[1:])  # the end of the turn, and a token that was written otherwise
    text(one.answer(one.messages[:1]))
    assert one.counted is not None
    assert one.counted.n_cached == one.counted.n_prompt - 1  # the last token is run


def test_an_adapter_remembers_nothing_of_the_base(models: dict[str, Model], tmp_path: Path):
    model = models["attention"]
    write_peft(random_adapter(model.config, lora_alpha=1.0), tmp_path / "peft", base=identity_of(model.weights))
    one = talk(model)
    text(one.say(TURNS[0]))
    assert "base: the same" in one.use_adapter(tmp_path / "peft")
    actual = text(one.answer(one.messages[:1]))
    assert one.counted is not None
    assert one.counted.n_cached == 0
    assert actual == text(model.generate(messages=one.messages[:1], max_tokens=12, adapter=one.adapter))
    assert actual != text(model.generate(messages=one.messages[:1], max_tokens=12))
    assert one.use_adapter(None) == "the base alone"
    assert text(one.answer(one.messages[:1])) == text(model.generate(messages=one.messages[:1], max_tokens=12))


def test_an_answer_that_is_given_up_counts_as_far_as_it_went(models: dict[str, Model]):
    one = talk(models["attention"])
    tokens = one.say("Once upon a time")
    heard = next(tokens).text + next(tokens).text + next(tokens).text
    tokens.close()  # type: ignore[attr-defined]
    assert one.messages[1:] == [{"role": "assistant", "content": heard}]
    said = text(one.say("go on"))
    assert said == text(models["attention"].generate(messages=one.messages[:-1], max_tokens=12))


def test_another_try_has_other_draws_and_a_conversation_can_be_repeated(models: dict[str, Model]):
    one, again = (talk(models["attention"], temperature=1.5, seed=3) for _ in range(2))
    first = text(one.say("Hello"))
    second = text(one.answer(one.messages[:1]))
    assert first != second
    assert (text(again.say("Hello")), text(again.answer(again.messages[:1]))) == (first, second)


def test_chat_session_refused_message_keeps_the_conversation(models: dict[str, Model]):
    one = talk(models["attention"])
    text(one.say("Hello"))
    before = list(one.messages)
    with refuses(ValueError, "context", 512):
        one.say("fox " * 600)
    with refuses(ValueError, expected="user"):
        one.answer(one.messages)
    assert one.messages == before


@pytest.mark.parametrize("open_model", [load, load_torch])
def test_without_a_chat_template_the_messages_are_joined_by_blank_lines(open_model: Callable[[str], Any]):
    model = open_model("story")
    one = talk(model)
    first = text(one.say("Once <|eot_id|> upon"))
    assert first == text(model.generate("Once <|eot_id|> upon", max_tokens=12))
    joined = f"Once <|eot_id|> upon\n\n{first}\n\nThe fox"
    assert text(one.say("The fox")) == text(model.generate(joined, max_tokens=12))
    assert model.tokenizer.decode(one.ids()) == f"{joined}\n\n{one.messages[-1]['content']}"


def test_a_chat_template_that_is_none_is_refused_at_once(tmp_path: Path):
    with refuses("TemplateError", tmp_path / "story"):
        talk(chat_model(tmp_path / "story", "story", "{% if %}"))
