"""Tokenizers of Hugging Face folders: tiny ones by hand, and the same ones in transformers."""

import json
from pathlib import Path

import pytest
from builders.huggingface_folders import BYTE_LEVEL, Json, added_token, folder_content
from builders.vocabularies import encoder_of, first_difference, generated_texts, tiny_byte_level, tiny_sentencepiece

from llorch.files.tokenizer import Tokenizer

WITH_WORDS = BYTE_LEVEL | {"use_regex": True}
DECODER = folder_content(tiny_sentencepiece())[0]["decoder"]["decoders"]  # type: ignore[index]
DIGITS: Json = {"type": "Digits", "individual_digits": True}
DIGITS_AND_WORDS: Json = {"type": "Sequence", "pretokenizers": [DIGITS, WITH_WORDS]}


def metaspace(scheme: str) -> Json:
    part = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    decoder = [*DECODER[:-1], *([] if scheme == "never" else DECODER[-1:])]  # then there is no space to take away
    return {"normalizer": None, "pre_tokenizer": part, "decoder": {"type": "Sequence", "decoders": decoder}}


def qwen() -> dict[str, object]:
    return tiny_byte_level() | {"tokenizer.ggml.pre": "qwen2"}


FORMS = {
    "llama-3": (tiny_byte_level, {}),
    "qwen": (qwen, {}),
    "gpt-2": (qwen, {"pre_tokenizer": WITH_WORDS, "normalizer": None}),
    "smollm": (qwen, {"pre_tokenizer": DIGITS_AND_WORDS, "normalizer": None}),
    "llama-2": (tiny_sentencepiece, {}),
    "llama-2 first": (tiny_sentencepiece, metaspace("first")),
    "llama-2 always": (tiny_sentencepiece, metaspace("always")),
    "llama-2 never": (tiny_sentencepiece, metaspace("never")),
}


def write(folder: Path, form: str, *, config: Json | None = None, **changes: object) -> Tokenizer:
    make, parts = FORMS[form]
    content, tokenizer_config = folder_content(make())
    tokenizer_config["eos_token"] = "</s>" if make is tiny_sentencepiece else "<|eot_id|>"
    (folder / "tokenizer.json").write_text(json.dumps(content | parts | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return Tokenizer.from_huggingface(folder)


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        ("llama-3", [260, 259]), ("qwen", [*b"wor"]), ("gpt-2", [*b"wor"]), ("smollm", [*b"wor"]),
        ("llama-2", [1, 259, 122, 114, 117]),
    ],
)  # fmt: skip
def test_words_are_merged_and_the_template_put_around_them(tmp_path: Path, form: str, ids: list[int]):
    assert write(tmp_path, form).encode("wor") == ids


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        ("llama-2", [265, 1, 265]),  # a space before the text and after each special token
        ("llama-2 always", [265, 1, 265]),
        ("llama-2 first", [265, 1, 260]),
        ("llama-2 never", [260, 1, 260]),
    ],
)
def test_a_space_goes_before_text_as_the_file_says(tmp_path: Path, form: str, ids: list[int]):
    tokenizer = write(tmp_path, form)
    assert tokenizer.encode("a<s>a", add_special=False, parse_special=True) == ids
    assert tokenizer.decode(ids, skip_special=False) == "a<s>a"
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_only_behind_a_beginning_the_space_of_the_text_is_taken_away(tmp_path: Path):
    tokenizer = write(tmp_path, "llama-2 first")
    assert tokenizer.decode([1, 265]) == "a"
    assert tokenizer.decode([2, 265]) == " a"
    assert tokenizer.encode("</s> a", add_special=False, parse_special=True) == [2, 265]


@pytest.mark.parametrize(
    ("switch", "ids"),
    [
        (None, [111, 32, 262, 32, 111, 262]),
        ("lstrip", [111, 262, 32, 111, 262]),
        ("rstrip", [111, 32, 262, 111, 262]),
        ("single_word", [111, 32, 262, 32, 111, *b"tool"]),
    ],
)
def test_added_tokens_take_the_text_that_their_switches_say(tmp_path: Path, switch: str | None, ids: list[int]):
    tool = added_token(262, "tool", special=False) | ({switch: True} if switch else {})
    added = [added_token(260, "<|begin_of_text|>"), added_token(261, "<|eot_id|>"), tool]
    assert write(tmp_path, "qwen", added_tokens=added).encode("o tool otool") == ids


@pytest.mark.parametrize(("normalized", "ids"), [(True, [262]), (False, [*b"\xe1\xb9\xa1"])])
def test_an_added_token_is_looked_for_before_or_behind_the_normalizer(tmp_path: Path, normalized: bool, ids: list[int]):
    added = [added_token(260, "<|begin_of_text|>"), added_token(261, "<|eot_id|>")]
    added += [added_token(262, "\u1e61", special=False) | {"normalized": normalized}]
    assert write(tmp_path, "qwen", added_tokens=added).encode("s\u0307") == ids


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_in_text_stay_text_unless_asked_for(tmp_path: Path, form: str):
    tokenizer = write(tmp_path, form)
    special = "</s>" if form.startswith("llama-2") else "<|eot_id|>"
    ids = tokenizer.encode(f"a{special}b", add_special=False)
    assert not tokenizer.eos_token_ids & {*ids}
    assert tokenizer.decode(ids) == f"a{special}b"
    assert len(tokenizer.encode(f"a{special}b", add_special=False, parse_special=True)) in (3, 4)
    assert tokenizer.encode(special, add_special=False, parse_special=True) == [*tokenizer.eos_token_ids]


def test_other_added_tokens_are_always_cut_out_and_shown(tmp_path: Path):
    added = [added_token(260, "<|begin_of_text|>"), added_token(261, "<|eot_id|>")]
    added += [added_token(262, "<tool>", special=False), added_token(263, "<|file_sep|>", special=False)]
    tokenizer = write(tmp_path, "qwen", added_tokens=added)
    assert tokenizer.encode("o<tool>o") == [ord("o"), 262, ord("o")]
    assert tokenizer.decode([262, 261]) == "<tool>"
    # This one ends a generation by its text, so it is a control token whatever the file says.
    assert tokenizer.encode("<|file_sep|>") == [*b"<|file_sep|>"]
    assert tokenizer.encode("<|file_sep|>", parse_special=True) == [263]
    assert tokenizer.eos_token_ids == {261, 263}


def test_begin_and_end_ids_come_from_all_configuration_files(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "bos_token_id": 9}))
    tokenizer = write(tmp_path, "qwen", config={"eos_token_id": 6, "bos_token_id": 5})
    assert tokenizer.eos_token_ids == {6, 7, 8, 261}
    assert tokenizer.bos_token_id == 5


def test_ids_that_only_pad_the_model_have_no_text(tmp_path: Path):
    tokenizer = write(tmp_path, "qwen", config={"vocab_size": 300})
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([ord("o"), 299]) == "o"
    assert tokenizer.token_bytes(299) == b""


def test_a_template_may_end_with_a_token(tmp_path: Path):
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    assert write(tmp_path, "llama-2", post_processor=template).encode("a") == [265, 2]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert write(tmp_path, "qwen", truncation=truncation).encode("ooooo") == [ord("o")] * 5


@pytest.mark.parametrize("form", ["llama-3", "smollm", "llama-2", "llama-2 never"])
def test_decoding_gives_the_text_back(tmp_path: Path, form: str):
    tokenizer = write(tmp_path, form)
    for text in generated_texts(300, seed=7):
        text = text.replace("\u2581", "_")
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.live
@pytest.mark.parametrize("form", FORMS)
def test_ids_equal_transformers(tmp_path: Path, form: str):
    import transformers

    ours = write(tmp_path, form)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    texts = ["", " ", "aaaa <s> aaab", "hello <|eot_id|> hello 1234", *generated_texts(300, seed=8)]
    assert first_difference(ours.encode, encoder_of(theirs), texts) is None
