"""Starts of tokens in a text, and control tokens that a user wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.huggingface_folders import added_token
from builders.vocabularies import generated_texts, tiny_byte_level, tiny_sentencepiece
from helpers.refusals import refuses

from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.conversation import Splitter, remove_marks
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from tests.files.tokenizer.test_huggingface import FORMS, write

GGUF_FORMS = {
    "gguf byte-level": tiny_byte_level,
    "gguf qwen": lambda: tiny_byte_level() | {"tokenizer.ggml.pre": "qwen2"},
    "gguf sentencepiece": tiny_sentencepiece,
    "gguf no prefix": lambda: tiny_sentencepiece() | {"tokenizer.ggml.add_space_prefix": False},
    "gguf with end": lambda: tiny_sentencepiece() | {"tokenizer.ggml.add_eos_token": True},
}
TEXTS = ["", " ", "wor hell aaab", " a  ab", "\u00e9\U0001f98a\u4f60 a", "<s>a</s> b<|eot_id|>x<tool>y[x]"]
TEXTS += generated_texts(30, seed=11)


@pytest.fixture(params=[*FORMS, *GGUF_FORMS])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param in FORMS:
        return write(tmp_path, request.param)
    make: Callable[[], dict[str, object]] = GGUF_FORMS[request.param]
    return Tokenizer(GGUFVocabulary(make(), "tiny.gguf"))


def test_starts_are_in_order_and_added_tokens_stand_outside_of_the_text(tokenizer: Tokenizer):
    for text in TEXTS[1:]:
        ids, starts = tokenizer.encode_spans(text)
        plain, _ = tokenizer.encode_spans(text, add_special=False)
        before = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
        after = len(ids) - before - len(plain)
        assert starts == sorted(starts)
        assert starts[:before] == [-1] * before
        assert starts[len(ids) - after :] == [len(text)] * after


def test_tokens_up_to_a_place_are_the_text_up_to_there(tokenizer: Tokenizer):
    for text in TEXTS:
        text = text.replace("\u2581", "_")  # SentencePiece writes a space this way
        ids, starts = tokenizer.encode_spans(text, add_special=False)
        if tokenizer.decode(ids) != text:
            continue  # composed by the NFC of a Qwen folder
        for count in range(0, len(starts), 7):
            if starts[count] not in starts[:count]:  # else in the middle of a character
                assert tokenizer.decode(ids[:count], skip_special=False) == text[: starts[count]]


def control(tokenizer: Tokenizer) -> tuple[str, int]:
    """A control token whose text is longer than a character."""
    one = max(tokenizer.eos_token_ids)
    return tokenizer.decode([one], skip_special=False), one


def test_without_inert_places_a_rendered_text_has_all_its_control_tokens(tokenizer: Tokenizer):
    text, one = control(tokenizer)
    ids, starts = tokenizer.encode_rendered(f"a{text}b{text}")
    assert ids == tokenizer.encode(f"a{text}b{text}", add_special=False, parse_special=True)
    assert [start for start, token in zip(starts, ids, strict=True) if token == one] == [1, 2 + len(text)]


def test_a_control_token_over_an_inert_place_stays_text_and_the_others_count(tokenizer: Tokenizer):
    text, one = control(tokenizer)
    user, both = f"x{text}y", f"x{text}y{text}ab"
    ids, starts = tokenizer.encode_rendered(both, inert=[2])
    assert ids.count(one) == 1
    place = ids.index(one)
    assert starts[place] == len(user)
    assert ids[:place] == tokenizer.encode(user, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == both
    assert starts == sorted(starts)
    # What stands behind the token is encoded as it would be without the user's text before it.
    assert ids[place:] == tokenizer.encode_rendered(f"{text}ab")[0][-(len(ids) - place) :]


@pytest.mark.parametrize("parts", [{}, {"rstrip": True}])
def test_a_control_token_of_one_character_that_a_user_wrote_stays_text(tmp_path: Path, parts: dict[str, bool]):
    added = [added_token(260, "<|begin_of_text|>"), added_token(261, "<|eot_id|>"), added_token(262, "\u20ac") | parts]
    tokenizer = write(tmp_path, "qwen", added_tokens=added)
    breaker = Splitter(tokenizer.control_texts)
    words = "o\u20ac \u20ac<|eot_id|>o"
    mark = breaker.mark_for(words)
    assert mark is not None
    text, inert = remove_marks(f"\u20ac{breaker.insert_marks(words, mark)}\u20aco<|eot_id|>", mark)
    ids, starts = tokenizer.encode_rendered(text, inert=inert)
    assert ids == [262, *tokenizer.encode(words), 262, ord("o"), 261]
    assert starts == sorted(starts)


def test_an_inert_place_at_the_edge_of_a_control_token_changes_nothing(tokenizer: Tokenizer):
    text, _ = control(tokenizer)
    whole = f"ab{text}ab"
    for place in (1, 2, 2 + len(text), 3 + len(text)):
        assert tokenizer.encode_rendered(whole, inert=[place]) == tokenizer.encode_rendered(whole)


def test_a_surrogate_is_refused(tokenizer: Tokenizer):
    with refuses(ValueError, "surrogate"):
        tokenizer.encode_rendered("a\ud800")


def test_every_control_token_has_its_text_and_id(tokenizer: Tokenizer):
    assert {tokenizer.decode([one], skip_special=False) for one in tokenizer.control_ids} == tokenizer.control_texts
    assert tokenizer.eos_token_ids <= tokenizer.control_ids


def test_the_end_token_is_the_one_that_the_file_names(tmp_path: Path):
    assert Tokenizer(GGUFVocabulary(tiny_byte_level(), "tiny.gguf")).eos_token_id == 261
    assert write(tmp_path, "qwen").eos_token_id == 261
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    assert Tokenizer.from_huggingface(tmp_path).eos_token_id is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [259, 261]}')
    assert Tokenizer.from_huggingface(tmp_path).eos_token_id == 259
