"""Tokenizers between GGUF metadata and Hugging Face files, on vocabularies made by hand; the real ones run live."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_folders import added_token, folder_content
from vocabularies import first_difference, generated_texts, tiny_byte_level, tiny_sentencepiece

from llorch.errors import FormatError
from llorch.tokenizer import Tokenizer
from llorch.tokenizer.export_gguf import GGUFTokenizer, read_tokenizer, require_same_ids
from llorch.tokenizer.export_huggingface import HuggingFaceTokenizer, translate_vocabulary
from llorch.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.tokenizer.merges import merges_of_scores, scores_of_merges

Metadata = dict[str, object]


def byte_level(pre: str) -> Metadata:
    return tiny_byte_level() | {"tokenizer.ggml.pre": pre}


VOCABULARIES: dict[str, Metadata] = {
    "llama-bpe": byte_level("llama-bpe"),
    "qwen2": byte_level("qwen2"),
    "smollm": byte_level("smollm"),
    "gpt-2": byte_level("gpt-2"),
    "llama": tiny_sentencepiece(),
    "llama without space": tiny_sentencepiece() | {"tokenizer.ggml.add_space_prefix": False},
    "with both": tiny_sentencepiece() | {"tokenizer.ggml.add_eos_token": True},
    "with none": byte_level("llama-bpe") | {"tokenizer.ggml.add_bos_token": False},
}


def to_folder(metadata: Metadata, folder: Path, *, family: str = "qwen3") -> HuggingFaceTokenizer:
    vocabulary = GGUFVocabulary(metadata, "m.gguf")
    made = translate_vocabulary(metadata, vocabulary, Path("m.gguf"), family=family, context=64)
    (folder / "tokenizer.json").write_text(json.dumps(made.tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(made.config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": made.eos_token_ids}))
    return made


def write(folder: Path, metadata: Metadata, **changes: Any) -> Path:
    content, config = folder_content(metadata)
    config["eos_token"] = "</s>" if metadata["tokenizer.ggml.model"] == "llama" else "<|eot_id|>"
    (folder / "tokenizer.json").write_text(json.dumps(content | changes), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def n_tokens(metadata: Metadata) -> int:
    return len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]


def assert_same(one: GGUFVocabulary | HuggingFaceVocabulary, other: GGUFVocabulary | HuggingFaceVocabulary) -> None:
    texts = ["hello <|eot_id|> wor", "a<s>a</s> ab", "<tool>x [x] aaaaab", *generated_texts(150, seed=21)]
    assert first_difference(Tokenizer(other).encode, Tokenizer(one).encode, texts) is None
    assert other.special == one.special
    assert [other.piece(i) for i in range(one.vocab_size)] == [one.piece(i) for i in range(one.vocab_size)]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_goes_to_a_folder_and_back(tmp_path: Path, name: str):
    metadata = VOCABULARIES[name]
    source = GGUFVocabulary(metadata, "m.gguf")
    to_folder(metadata, tmp_path)
    assert_same(source, HuggingFaceVocabulary(tmp_path))
    back = read_tokenizer(tmp_path, source.vocab_size)
    assert_same(source, GGUFVocabulary(back.metadata, "back.gguf"))
    for key in ("model", "tokens", "merges", "bos_token_id", "eos_token_id"):
        key = f"tokenizer.ggml.{key}"
        assert np.array_equal(back.metadata.get(key), metadata.get(key)), key  # type: ignore[arg-type]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
def test_the_pre_tokenizer_is_recognised_by_its_pattern(tmp_path: Path, pre: str):
    to_folder(byte_level(pre), tmp_path)
    assert read_tokenizer(tmp_path, 265).metadata["tokenizer.ggml.pre"] == pre


def test_a_padded_embedding_gets_unused_tokens_which_do_not_come_back(tmp_path: Path):
    to_folder(byte_level("qwen2"), tmp_path)
    metadata = read_tokenizer(tmp_path, 300).metadata
    assert metadata["tokenizer.ggml.tokens"][265:267] == [b"[PAD265]", b"[PAD266]"]  # type: ignore[index]
    assert metadata["tokenizer.ggml.token_type"][265:].tolist() == [5] * 35  # type: ignore[index]
    made = to_folder(metadata, tmp_path)
    assert len(made.tokenizer["model"]["vocab"]) + len(made.tokenizer["added_tokens"]) == 265


def test_more_tokens_than_rows_are_refused(tmp_path: Path):
    to_folder(byte_level("qwen2"), tmp_path)
    with pytest.raises(FormatError, match="token 264 has no row in the embedding of the model, which has 264"):
        read_tokenizer(tmp_path, 264)


def normalized(tokenizer: GGUFTokenizer) -> object:
    return tokenizer.metadata.get("llorch.tokenizer.normalizer")


def test_nfc_is_kept_and_noted(tmp_path: Path):
    tokenizer = read_tokenizer(write(tmp_path, byte_level("qwen2")), 265)
    assert normalized(tokenizer) == "NFC"
    assert "NFC" in tokenizer.notes[0]
    assert to_folder(tokenizer.metadata, tmp_path).tokenizer["normalizer"] == {"type": "NFC"}
    assert Tokenizer.from_huggingface(tmp_path).encode("e\u0301") == [*"\u00e9".encode()]


def test_a_qwen2_model_gets_the_nfc_that_transformers_gives_it_anyway(tmp_path: Path):
    made = to_folder(byte_level("qwen2"), tmp_path, family="qwen2")
    assert made.tokenizer["normalizer"] == {"type": "NFC"}
    assert made.notes == ["transformers composes characters first (NFC) for every qwen2, llama.cpp takes text as it is"]
    other = to_folder(byte_level("qwen2"), tmp_path, family="qwen3")
    assert other.tokenizer["normalizer"] is None
    assert "Qwen's own composes characters first" in other.notes[0]


@pytest.mark.parametrize("name", ["llama-bpe", "llama"])
def test_a_qwen2_model_with_other_words_is_refused(tmp_path: Path, name: str):
    with pytest.raises(FormatError, match="expected qwen2 for this family, as transformers cuts words"):
        to_folder(VOCABULARIES[name], tmp_path, family="qwen2")


@pytest.mark.parametrize(
    ("scheme", "note"),
    [("first", "before the text only, and none if it begins"), ("always", "none before a text that")],
)
def test_spaces_that_llama_cpp_would_add_are_kept_and_noted(tmp_path: Path, scheme: str, note: str):
    part = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    tokenizer = read_tokenizer(write(tmp_path, tiny_sentencepiece(), normalizer=None, pre_tokenizer=part), 267)
    assert tokenizer.metadata["tokenizer.ggml.add_space_prefix"] is True
    assert note in tokenizer.notes[0]
    assert to_folder(tokenizer.metadata, tmp_path).tokenizer["pre_tokenizer"] == part


def test_ignore_merges_must_be_as_llama_cpp_has_it(tmp_path: Path):
    metadata = byte_level("qwen2")
    content, _ = folder_content(metadata)
    write(tmp_path, metadata, model=content["model"] | {"ignore_merges": True})  # type: ignore[operator]
    with pytest.raises(FormatError, match=r"llama\.cpp has it off for qwen2, got True"):
        read_tokenizer(tmp_path, 265)


def test_two_tokens_before_a_text_are_refused(tmp_path: Path):
    one = {"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [one, one, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|eot_id|>": {"id": "<|eot_id|>", "ids": [261], "tokens": ["<|eot_id|>"]}},
    }
    with pytest.raises(FormatError, match=r"at most one token before a text, got \[261, 261\]"):
        read_tokenizer(write(tmp_path, byte_level("qwen2"), post_processor=template), 265)


def test_end_tokens_that_llama_cpp_would_not_find_get_a_role(tmp_path: Path):
    write(tmp_path, byte_level("qwen2"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, 7, 8, 9]}))
    tokenizer = read_tokenizer(tmp_path, 265)
    assert GGUFVocabulary(tokenizer.metadata, "m").special.eos_token_ids >= {261, 7, 8}
    assert "llama.cpp will not stop at 9" in tokenizer.notes[-1]


def test_the_named_end_token_comes_first_of_all(tmp_path: Path):
    made = to_folder(byte_level("llama-bpe") | {"tokenizer.ggml.eos_token_id": 262}, tmp_path)
    assert made.eos_token_ids == [262, 261, 263]  # the last one by its text


def test_the_settings_of_generation_name_the_end_before_those_of_the_model(tmp_path: Path):
    metadata = byte_level("llama-bpe")
    write(tmp_path, metadata)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 259}))
    assert read_tokenizer(tmp_path, n_tokens(metadata)).metadata["tokenizer.ggml.eos_token_id"] == 259
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, 259]}))
    assert read_tokenizer(tmp_path, n_tokens(metadata)).metadata["tokenizer.ggml.eos_token_id"] == 261


def test_switches_of_added_tokens_are_noted(tmp_path: Path):
    added = [added_token(260, "<|begin_of_text|>"), added_token(261, "<|eot_id|>") | {"lstrip": True}]
    tokenizer = read_tokenizer(write(tmp_path, byte_level("qwen2"), added_tokens=added), 262)
    assert "1 added tokens have lstrip, which llama.cpp ignores: <|eot_id|>" in tokenizer.notes


def test_scores_give_all_cuts_and_come_back_in_the_same_order():
    scores = {"a": -1.0, "b": -2.0, "aa": -5.0, "ab": -4.0, "aab": -9.0}
    merges = merges_of_scores(scores)
    assert merges == [("a", "b"), ("a", "a"), ("aa", "b"), ("a", "ab")]
    back = scores_of_merges(merges, scores, path=Path("t"))
    assert back["ab"] > back["aa"] > back["aab"] > back["a"] == back["b"]


def test_tokens_of_equal_score_grow_from_the_left_and_share_a_score_again():
    scores = {"a": 0.0, "aa": -5.0, "aaa": -5.0, "aaaa": -5.0}
    merges = merges_of_scores(scores)
    assert merges[:2] == [("aaa", "a"), ("aa", "aa")]
    back = scores_of_merges(merges, scores, path=Path("t"))
    assert back["aaaa"] == back["aaa"] > back["aa"]


def test_merges_that_leave_cuts_out_are_refused():
    with pytest.raises(FormatError, match=r"Unsupported: .*got 1 fewer \(such as 'a' \+ 'ab'\)"):
        scores_of_merges([("a", "a"), ("a", "b"), ("aa", "b")], {"a", "b", "aa", "ab", "aab"}, path=Path("t"))


def test_a_vocabulary_that_became_another_one_is_refused():
    one, other = (GGUFVocabulary(byte_level(pre), "m.gguf") for pre in ("llama-bpe", "qwen2"))
    require_same_ids(one, one, path=Path("m.gguf"))
    with pytest.raises(FormatError, match=r"tokenizer: the target would encode '' as \[\], the source has \[260\]"):
        require_same_ids(one, other, path=Path("m.gguf"))


TEMPLATES = [None, "{{ messages }}", [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_go_along(tmp_path: Path, template: object):
    write(tmp_path, byte_level("llama-bpe"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    metadata = read_tokenizer(tmp_path, 265).metadata
    assert to_folder(metadata, tmp_path).config.get("chat_template") == template


def test_a_template_file_counts_before_the_config(tmp_path: Path):
    write(tmp_path, byte_level("llama-bpe"))
    (tmp_path / "chat_template.jinja").write_text("from the file \u4f60", encoding="utf-8")
    assert read_tokenizer(tmp_path, 265).metadata["tokenizer.chat_template"] == "from the file \u4f60"
