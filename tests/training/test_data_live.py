"""Ids and masks of conversations, against transformers on the same folder and template."""

import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders.chat_models import CHATML, LLAMA_3, chat_folder
from builders.huggingface_folders import write_folder
from builders.vocabularies import generated_texts, real_vocabulary
from fetch_vocabularies import TEMPLATES
from helpers.refusals import refuses

from llorch.files import open_weights
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.chat import TemplateSettings, compiled
from llorch.files.tokenizer.conversation import Conversation, Splitter
from llorch.model.model import Model
from llorch.training.batch import IGNORED, Example
from llorch.training.data.encode import Encoder, render_turns
from llorch.training.data.formats import Chat
from llorch.training.data.read import Record
from llorch.training.settings import DataSettings

pytestmark = pytest.mark.live

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "caf\u00e9"}}}
TOOLS: list[object] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
]


def conversations(count: int, *, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Turns of generated texts, some of them empty, with and without a system text."""
    rng = random.Random(seed)
    texts = iter(generated_texts(8 * count, seed=seed))
    for _ in range(count):
        roles = ["system"] * rng.randrange(2) + ["user", "assistant"] * rng.randrange(1, 4)
        yield [{"role": role, "content": next(texts) if rng.random() < 0.9 else ""} for role in roles]


def their_tokenizer(folder: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


def has_control(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> bool:
    breaker = Splitter(tokenizer.control_texts)
    return any(breaker.found_in(message["content"]) for message in messages)


@pytest.fixture(scope="module", params=[("micro-qwen3", CHATML), ("micro-llama3", LLAMA_3)], ids=["chatml", "llama3"])
def model_and_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    name, template = request.param
    folder = chat_folder(tmp_path_factory.mktemp("model") / "m", name, template)
    return Model(open_weights(folder)), their_tokenizer(folder)


def encode_with_llorch(model: Model, messages: list[dict[str, Any]], tools: list[object] | None = None) -> Example:
    learned = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    (found,) = Encoder(model, DataSettings(max_length=10**6)).encode(Chat(messages, tools, learned), Record({}, "", ""))
    return found


def encode_with_transformers(tokenizer: Any, messages: list[dict[str, Any]], tools: list[object] | None = None) -> Any:
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )


def test_ids_and_mask_equal_the_generation_tags_of_transformers(model_and_tokenizer: tuple[Model, Any]):
    model, tokenizer = model_and_tokenizer
    compared = 0
    for messages in conversations(120, seed=21):
        if has_control(messages, model.tokenizer):
            continue
        for message in messages:
            message["content"] = message["content"].strip()  # transformers masks all from a turn that starts with space
        found, expected = encode_with_llorch(model, messages), encode_with_transformers(tokenizer, messages)
        assert list(found.ids) == expected["input_ids"]
        assert [label != IGNORED for label in found.labels] == [bool(one) for one in expected["assistant_masks"]]
        compared += 1
    assert compared > 20


def test_a_turn_that_starts_with_space_is_learned_like_any_other(model_and_tokenizer: tuple[Model, Any]):
    """Where transformers finds no token at the first character of a turn, and learns nothing from there on."""
    model, tokenizer = model_and_tokenizer
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "  two"}] * 2
    found, expected = encode_with_llorch(model, messages), encode_with_transformers(tokenizer, messages)
    assert list(found.ids) == expected["input_ids"]
    turn = {"qwen3": "  two<|im_end|>", "llama": "two<|eot_id|>"}[model.config.family]  # the latter's template trims
    assert model.tokenizer.decode([one for one in found.labels if one != IGNORED], skip_special=False) == turn * 2


def test_tools_and_calls_equal_transformers(model_and_tokenizer: tuple[Model, Any]):
    model, tokenizer = model_and_tokenizer
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ]
    if model.config.family == "llama":  # whose template writes no calls: transformers leaves them out without a word
        with refuses("Unsupported", "messages[1].tool_calls"):
            encode_with_llorch(model, messages, TOOLS)
        del messages[1]["tool_calls"]
        messages[1]["content"] = "f"
    found, expected = encode_with_llorch(model, messages, TOOLS), encode_with_transformers(tokenizer, messages, TOOLS)
    assert list(found.ids) == expected["input_ids"]
    assert [label != IGNORED for label in found.labels] == [bool(one) for one in expected["assistant_masks"]]


def test_control_tokens_of_users_equal_the_sanitised_ids_of_transformers(model_and_tokenizer: tuple[Model, Any]):
    model, tokenizer = model_and_tokenizer
    compared = 0
    for messages in conversations(15, seed=22):
        for control in sorted(model.tokenizer.control_texts):
            evil = [m | {"content": f"{m['content']} x{control}y"} for m in messages]
            expected = tokenizer.apply_chat_template(
                evil, tokenize=True, return_dict=True, sanitize_control_tokens=True
            )
            assert list(encode_with_llorch(model, evil).ids) == expected["input_ids"], (control, evil)
            compared += 1
    assert compared >= 45


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Tokenizer, Any]]:
    """The tokenizers of llorch and of transformers for a real vocabulary."""

    @cache
    def make(name: str) -> tuple[Tokenizer, Any]:
        folder = tmp_path_factory.mktemp("vocabulary")
        write_folder(real_vocabulary(name), folder)
        return Tokenizer.from_huggingface(folder), their_tokenizer(folder)

    return make


@pytest.mark.nightly_cases(but=["meta-llama-Llama-3.2-3B-Instruct"])
@pytest.mark.weights
@pytest.mark.parametrize("name", [name for name in TEMPLATES if "R1" not in name])  # R1 opens turns differently
def test_real_templates_and_vocabularies_give_the_ids_of_transformers(
    name: str, real: Callable[[str], tuple[Tokenizer, Any]]
):
    vocabulary = "llama-bpe" if "llama" in name else "qwen2"
    tokenizer, other = real(vocabulary)
    source = (real_vocabulary(vocabulary).parent / "templates" / f"{name}.jinja").read_text()
    source = source.replace("strftime_now is defined", "false")
    template = compiled({"default": source}, tokenizer, path=name)["default"]
    breaker = Splitter(tokenizer.control_texts)
    for messages in conversations(25, seed=23):
        if has_control(messages, tokenizer):
            continue
        turns = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
        conversation = Conversation(messages, None, template, breaker, TemplateSettings())
        assert sum(len(one.spans) for one in render_turns(turns, conversation)) == len(turns)
        for place in turns:
            (one,) = render_turns([place], conversation)
            before, after = messages[:place], messages[: place + 1]
            expected = other.apply_chat_template(after, chat_template=source, tokenize=True, return_dict=True)
            assert tokenizer.encode_rendered(one.text)[0] == expected["input_ids"]
            opened = other.apply_chat_template(before, chat_template=source, tokenize=False, add_generation_prompt=True)
            assert one.text[: one.spans[0][0]] == opened
