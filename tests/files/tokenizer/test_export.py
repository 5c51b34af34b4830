"""Tokenizers between GGUF metadata and Hugging Face files, on vocabularies made by hand; the real ones run live."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.huggingface_folders import added_token, folder_content
from builders.vocabularies import first_difference, generated_texts, tiny_byte_level, tiny_sentencepiece
from helpers.refusals import Refusal, assert_tells, refuses, row

from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.export_gguf import read_tokenizer, require_same_ids
from llorch.files.tokenizer.export_huggingface import HuggingFaceTokenizer, translate_vocabulary
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.files.tokenizer.merges import merges_of_scores, scores_of_merges

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


def assert_same(a: GGUFVocabulary | HuggingFaceVocabulary, b: GGUFVocabulary | HuggingFaceVocabulary) -> None:
    texts = ["hello <|eot_id|> wor", "a<s>a</s> ab", "<tool>x [x] aaaaab", *generated_texts(150, seed=21)]
    assert first_difference(Tokenizer(b).encode, Tokenizer(a).encode, texts) is None
    assert b.special == a.special
    assert [b.piece(i) for i in range(a.vocab_size)] == [a.piece(i) for i in range(a.vocab_size)]


@pytest.mark.slow_cases(but=["llama without space", "qwen2"])
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


def test_nfc_is_kept_and_noted(tmp_path: Path):
    tokenizer = read_tokenizer(write(tmp_path, byte_level("qwen2")), 265)
    assert tokenizer.metadata["llorch.files.tokenizer.normalizer"] == "NFC"
    assert "NFC" in tokenizer.notes[0]
    assert to_folder(tokenizer.metadata, tmp_path).tokenizer["normalizer"] == {"type": "NFC"}
    assert Tokenizer.from_huggingface(tmp_path).encode("e\u0301") == [*"\u00e9".encode()]


def test_a_qwen2_model_gets_the_nfc_that_transformers_gives_it_anyway(tmp_path: Path):
    made = to_folder(byte_level("qwen2"), tmp_path, family="qwen2")
    assert made.tokenizer["normalizer"] == {"type": "NFC"}
    (note,) = made.notes
    assert_tells(note, "transformers", "NFC", "qwen2", "llama.cpp")
    other = to_folder(byte_level("qwen2"), tmp_path, family="qwen3")
    assert other.tokenizer["normalizer"] is None
    assert_tells(other.notes[0], "Qwen")


@pytest.mark.parametrize(("scheme", "word"), [("first", "only"), ("always", "no")])
def test_spaces_that_llama_cpp_would_add_are_kept_and_noted(tmp_path: Path, scheme: str, word: str):
    part = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    tokenizer = read_tokenizer(write(tmp_path, tiny_sentencepiece(), normalizer=None, pre_tokenizer=part), 267)
    assert tokenizer.metadata["tokenizer.ggml.add_space_prefix"] is True
    assert_tells(tokenizer.notes[0], word, "llama.cpp", "special token")
    assert to_folder(tokenizer.metadata, tmp_path).tokenizer["pre_tokenizer"] == part


def test_end_tokens_that_llama_cpp_would_not_find_get_a_role(tmp_path: Path):
    write(tmp_path, byte_level("qwen2"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, 7, 8, 9]}))
    tokenizer = read_tokenizer(tmp_path, 265)
    assert GGUFVocabulary(tokenizer.metadata, "m").special.eos_token_ids >= {261, 7, 8}
    assert_tells(tokenizer.notes[-1], "llama.cpp", "at 9")


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
    (note,) = (note for note in tokenizer.notes if "lstrip" in note)
    assert_tells(note, 1, "llama.cpp", "<|eot_id|>")


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


def more_tokens_than_rows(tmp_path: Path) -> None:
    to_folder(byte_level("qwen2"), tmp_path)
    read_tokenizer(tmp_path, 264)


def ignored_merges(tmp_path: Path) -> None:
    metadata = byte_level("qwen2")
    content, _ = folder_content(metadata)
    write(tmp_path, metadata, model=content["model"] | {"ignore_merges": True})  # type: ignore[operator]
    read_tokenizer(tmp_path, 265)


def two_tokens_before_a_text(tmp_path: Path) -> None:
    one = {"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [one, one, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|eot_id|>": {"id": "<|eot_id|>", "ids": [261], "tokens": ["<|eot_id|>"]}},
    }
    read_tokenizer(write(tmp_path, byte_level("qwen2"), post_processor=template), 265)


def other_words(tmp_path: Path, name: str) -> None:
    to_folder(VOCABULARIES[name], tmp_path, family="qwen2")


CUTS = [("a", "a"), ("a", "b"), ("aa", "b")]
REFUSALS = [
    row("more tokens than rows", more_tokens_than_rows, "Inconsistent", "token 264", "264 rows",
        where="tokenizer.json"),
    row("ignored merges", ignored_merges, "Unsupported", "off for qwen2", where="ignore_merges", got=True),
    row("two tokens before a text", two_tokens_before_a_text, "Unsupported", "before", where="post_processor",
        got=[261, 261]),
    row("merges that leave cuts out", lambda path: scores_of_merges(CUTS, {"a", "b", "aa", "ab", "aab"}, path=path),
        "Unsupported", got=("1 fewer", "'a' + 'ab'")),
    row("words of llama-bpe", lambda folder: other_words(folder, "llama-bpe"), "Unsupported", "transformers",
        where="tokenizer.ggml.pre", expected="qwen2", got="'llama-bpe'"),
    row("words of llama", lambda folder: other_words(folder, "llama"), "Unsupported", "transformers",
        where="tokenizer.ggml.pre", expected="qwen2", got="''"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_tokenizer_that_cannot_be_kept_is_refused(tmp_path: Path, refusal: Refusal):
    refusal.check(tmp_path)


def test_a_vocabulary_that_became_another_one_is_refused():
    one, other = (GGUFVocabulary(byte_level(pre), "m.gguf") for pre in ("llama-bpe", "qwen2"))
    require_same_ids(one, one, path=Path("m.gguf"))
    with refuses("Unsupported", "encode '' as []", "source has [260]", where="tokenizer"):
        require_same_ids(one, other, path=Path("m.gguf"))


TEMPLATES = [None, "{{ messages }}", [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_go_along(tmp_path: Path, template: object):
    write(tmp_path, byte_level("llama-bpe"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert to_folder(read_tokenizer(tmp_path, 265).metadata, tmp_path).config.get("chat_template") == template


def test_a_template_file_counts_before_the_config(tmp_path: Path):
    write(tmp_path, byte_level("llama-bpe"))
    (tmp_path / "chat_template.jinja").write_text("from the file \u4f60", encoding="utf-8")
    assert read_tokenizer(tmp_path, 265).metadata["tokenizer.chat_template"] == "from the file \u4f60"
