"""Faulty vocabularies: each is refused with its code, and the message names the place."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from huggingface_folders import BYTE_LEVEL, Json, added_token, folder_content
from vocabularies import tiny_byte_level, tiny_sentencepiece

from llorch.errors import FormatError
from llorch.tokenizer import Tokenizer
from llorch.tokenizer.gguf_vocabulary import GGUFVocabulary

Change = Callable[[dict], object]


def put(key: str, value: object) -> Change:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value})


def drop(key: str) -> Change:
    return lambda metadata: metadata.pop(f"tokenizer.ggml.{key}")


def set_item(key: str, index: int, value: object) -> Change:
    return lambda metadata: metadata[f"tokenizer.ggml.{key}"].__setitem__(index, value)


def resize(key: str, size: int) -> Change:
    name = f"tokenizer.ggml.{key}"
    return lambda metadata: metadata.update({name: np.resize(metadata[name], size)})


def as_type(key: str, dtype: type) -> Change:
    name = f"tokenizer.ggml.{key}"
    return lambda metadata: metadata.update({name: metadata[name].astype(dtype)})


BOTH = [
    pytest.param(drop("model"), "Missing", "no vocabulary", id="no model"),
    pytest.param(put("model", "no_vocab"), "Missing", "no vocabulary", id="no_vocab"),
    pytest.param(put("model", "bert"), "Unsupported", "got 'bert'", id="model bert"),
    pytest.param(drop("tokens"), "Missing", "tokens: expected a list", id="no tokens"),
    pytest.param(put("tokens", []), "Missing", "at least one token", id="empty tokens"),
    pytest.param(put("tokens", np.zeros(3)), "Inconsistent", "a list of strings, got ndarray", id="tokens numbers"),
    pytest.param(put("tokens", "abc"), "Inconsistent", "a list of strings, got str", id="tokens one string"),
    pytest.param(set_item("tokens", 5, b"x" * 1025), "TooLarge", "got 1025 in token 5", id="token long"),
    pytest.param(set_item("tokens", 5, b"a"), "Duplicate", "'a' as token 5 and as token", id="token twice"),
    pytest.param(lambda m: m.update({"tokenizer.ggml.tokens": [b"a"] * 9}), "Duplicate", "'a' as token 0", id="equal"),
    pytest.param(put("bos_token_id", 9999), "OutOfRange", "got 9999", id="bos 9999"),
    pytest.param(put("eos_token_id", -1), "OutOfRange", "got -1", id="eos -1"),
    pytest.param(put("eot_token_id", "2"), "Malformed", "eot_token_id", id="eot text"),
    pytest.param(put("add_eos_token", 1), "Malformed", "add_eos_token", id="add_eos 1"),
    pytest.param(drop("bos_token_id"), "Missing", "bos_token_id", id="no bos to add"),
    pytest.param(set_item("token_type", 3, 99), "OutOfRange", "got 99 for token 3", id="type 99"),
    pytest.param(set_item("token_type", 3, -1), "OutOfRange", "got -1 for token 3", id="type -1"),
    pytest.param(resize("token_type", 20), "Inconsistent", "got 20", id="types short"),
    pytest.param(resize("token_type", 900), "Inconsistent", "got 900", id="types long"),
    pytest.param(as_type("token_type", np.float32), "Inconsistent", "got float32", id="types floats"),
    pytest.param(put("token_type", [b"a"]), "Inconsistent", "got list", id="types strings"),
]
BYTE_LEVEL_ONLY = [
    pytest.param(drop("pre"), "Missing", "pre", id="no pre"),
    pytest.param(put("pre", "default"), "Unsupported", "got 'default'", id="pre default"),
    pytest.param(put("pre", "(a+)+$"), "Unsupported", "qwen2", id="pre unknown"),
    pytest.param(drop("merges"), "Missing", "merges", id="no merges"),
    pytest.param(put("merges", np.zeros(2)), "Inconsistent", "list of strings", id="merges numbers"),
    pytest.param(put("merges", [b"he"]), "Malformed", "got b'he' at index 0", id="merge without space"),
    pytest.param(put("merges", [b"l l", b"h e l"]), "Malformed", "got b'h e l' at index 1", id="merge two spaces"),
    pytest.param(put("merges", [b" he"]), "Malformed", "got b' he'", id="merge left empty"),
    pytest.param(put("merges", [b"he "]), "Malformed", "got b'he '", id="merge right empty"),
    pytest.param(put("merges", [b"hx e"]), "Malformed", "got b'hx e'", id="merge left unknown"),
    pytest.param(put("merges", [b"h ex"]), "Malformed", "got b'h ex'", id="merge right unknown"),
    pytest.param(put("merges", [b"h h"]), "Malformed", "got b'h h'", id="merge result unknown"),
    pytest.param(put("merges", [b"l l", b"l l"]), "Duplicate", "got b'l l' again at index 1", id="merge twice"),
    pytest.param(set_item("token_type", 256, 3), "Malformed", "got b'h e'", id="merge makes a control token"),
    pytest.param(set_item("tokens", 9, b"a\xff"), "Malformed", "got b'a\\xff' as token 9", id="not UTF-8"),
    pytest.param(set_item("tokens", 10, b"xyz"), "Missing", "1 bytes of text have no token: 0x0A", id="byte absent"),
]
SENTENCEPIECE_ONLY = [
    pytest.param(drop("scores"), "Missing", "scores", id="no scores"),
    pytest.param(resize("scores", 30), "Inconsistent", "got 30", id="scores short"),
    pytest.param(as_type("scores", np.int8), "Inconsistent", "got int8", id="scores int8"),
    pytest.param(as_type("scores", np.float64), "Inconsistent", "got float64", id="scores float64"),
    pytest.param(set_item("scores", 260, np.nan), "NonFinite", "got nan for token 260", id="score nan"),
    pytest.param(set_item("tokens", 8, b"<0xZZ>"), "Malformed", "got '<0xZZ>' as token 8", id="byte ZZ"),
    pytest.param(set_item("tokens", 8, b"<0x-1>"), "Malformed", "got '<0x-1>' as token 8", id="byte -1"),
    pytest.param(set_item("token_type", 13, 1), "Missing", "no token: 0x0A", id="byte absent"),
    pytest.param(put("add_space_prefix", "yes"), "Malformed", "add_space_prefix", id="prefix text"),
]


def refused(metadata: dict[str, object], change: Change, code: str, words: str) -> None:
    change(metadata)
    with pytest.raises(FormatError) as caught:
        Tokenizer(GGUFVocabulary(metadata, "tiny.gguf"))
    assert caught.value.code == code
    assert str(caught.value).startswith(f"tiny.gguf: {code}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(("change", "code", "words"), BOTH + BYTE_LEVEL_ONLY)
def test_a_faulty_byte_level_vocabulary_is_refused(change: Change, code: str, words: str):
    refused(tiny_byte_level(), change, code, words)


@pytest.mark.parametrize(("change", "code", "words"), BOTH + SENTENCEPIECE_ONLY)
def test_a_faulty_sentencepiece_vocabulary_is_refused(change: Change, code: str, words: str):
    refused(tiny_sentencepiece(), change, code, words)


def folder_of(tmp_path: Path, change: Change) -> Path:
    content, config = folder_content(tiny_byte_level())
    files = {"tokenizer.json": content, "tokenizer_config.json": config}
    files |= {"config.json": {}, "generation_config.json": {}}
    change(files)
    for name, value in files.items():
        if value is not None:
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return tmp_path


def at(path: str, value: object) -> Change:
    """Set a value deep inside tokenizer.json; `path` has the keys and indices."""

    def change(files: dict) -> None:
        node = files["tokenizer.json"]
        *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        for key in keys:
            node = node[key]
        node[last] = value

    return change


def config(name: str, **values: object) -> Change:
    return lambda files: files[name].update(values)


SPLIT: Json = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
PREFIXED = BYTE_LEVEL | {"add_prefix_space": True}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def two_templates(files: dict) -> None:
    processors = files["tokenizer.json"]["post_processor"]["processors"]
    processors.append(processors[1])


TEMPLATE = "post_processor/processors/1"
FOLDERS = [
    pytest.param(lambda files: files.update({"tokenizer.json": None}), "Missing", "no tokenizer.json", id="no file"),
    pytest.param(lambda files: files.update({"tokenizer.json": "{"}), "Malformed", "JSON", id="cut"),
    pytest.param(lambda files: files.update({"tokenizer.json": "[]"}), "Malformed", "object", id="a list"),
    pytest.param(at("pre_tokenizer/pretokenizers/0", SPLIT), "Unsupported", "(a+)+$", id="foreign regex"),
    pytest.param(at("pre_tokenizer/pretokenizers/0/invert", True), "Unsupported", "pre_tokenizer", id="inverted split"),
    pytest.param(at("pre_tokenizer", {"type": "Whitespace"}), "Unsupported", "Whitespace", id="foreign pre-tokenizer"),
    pytest.param(at("pre_tokenizer", PREFIXED), "Unsupported", "prefix", id="prefix space"),
    pytest.param(at("pre_tokenizer", None), "Unsupported", "normalizer", id="no pre-tokenizer"),
    pytest.param(at("normalizer", {"type": "Lowercase"}), "Unsupported", "Lowercase", id="foreign normalizer"),
    pytest.param(at("model", None), "Missing", "model", id="no model"),
    pytest.param(at("model/type", "Unigram"), "Unsupported", "Unigram", id="unigram"),
    pytest.param(at("model/dropout", 0.1), "Unsupported", "dropout", id="dropout"),
    pytest.param(at("model/end_of_word_suffix", "</w>"), "Unsupported", "suffix", id="suffix"),
    pytest.param(at("model/byte_fallback", True), "Unsupported", "byte_fallback", id="bytes twice"),
    pytest.param(at("model/surprise", 1), "Unsupported", "surprise", id="unknown field"),
    pytest.param(at("model/vocab", []), "Malformed", "vocab", id="vocab a list"),
    pytest.param(at("model/vocab/he", "256"), "Malformed", "'he'", id="id a text"),
    pytest.param(at("model/vocab/he", -1), "OutOfRange", "'he'", id="id -1"),
    pytest.param(at("model/vocab/he", 1 << 40), "OutOfRange", "'he'", id="id huge"),
    pytest.param(at("model/vocab/he", 257), "Duplicate", "257", id="id twice"),
    pytest.param(lambda files: files["tokenizer.json"]["model"]["vocab"].pop("a"), "Missing", "'a'", id="byte absent"),
    pytest.param(at("model/merges", {}), "Malformed", "merges", id="merges an object"),
    pytest.param(at("model/merges/0", "he"), "Malformed", "'he' at index 0", id="merge without space"),
    pytest.param(at("model/merges/0", ["h", "e", "l"]), "Malformed", "index 0", id="merge of three"),
    pytest.param(at("model/merges/0", 7), "Malformed", "got 7", id="merge a number"),
    pytest.param(at("added_tokens", None), "Malformed", "added_tokens", id="no added tokens"),
    pytest.param(at("added_tokens/0", "x"), "Malformed", "objects", id="added a text"),
    pytest.param(at("added_tokens/0", added_token(260, "")), "Malformed", "text", id="added empty"),
    pytest.param(at("added_tokens/0", added_token(999, "<x>")), "Inconsistent", "got 999", id="added id with a gap"),
    pytest.param(at("added_tokens/0/special", "yes"), "Malformed", "special", id="special a text"),
    pytest.param(at("post_processor", {"type": "Roberta"}), "Unsupported", "Roberta", id="foreign template"),
    pytest.param(lambda files: two_templates(files), "Unsupported", "one TemplateProcessing", id="two templates"),
    pytest.param(at("decoder", None), "Unsupported", "expected ByteLevel, got None", id="no decoder"),
    pytest.param(at("decoder", STRIP), "Unsupported", "expected ByteLevel, got {'type': 'Strip'", id="strip decoder"),
    pytest.param(at(f"{TEMPLATE}/single", []), "Malformed", "0 times", id="template without text"),
    pytest.param(at(f"{TEMPLATE}/single/0", 5), "Malformed", "got 5", id="template step"),
    pytest.param(at(f"{TEMPLATE}/special_tokens", {}), "Malformed", "special", id="template token"),
    pytest.param(
        at(f"{TEMPLATE}/special_tokens/<|begin_of_text|>/ids", [4096]), "OutOfRange", "4096", id="template id"
    ),
    pytest.param(config("config.json", eos_token_id=265), "OutOfRange", "got 265", id="eos 265"),
    pytest.param(config("config.json", bos_token_id="1"), "Malformed", "bos_token_id", id="bos a text"),
    pytest.param(config("generation_config.json", eos_token_id=[1, 2.5]), "Malformed", "2.5", id="eos a float"),
    pytest.param(config("tokenizer_config.json", eos_token="<x>"), "Missing", "'<x>'", id="eos unknown"),
    pytest.param(config("tokenizer_config.json", eos_token=5), "Malformed", "got 5", id="eos a number"),
]


@pytest.mark.parametrize(("change", "code", "words"), FOLDERS)
def test_a_faulty_folder_is_refused(tmp_path: Path, change: Change, code: str, words: str):
    folder = folder_of(tmp_path, change)
    with pytest.raises(FormatError) as caught:
        Tokenizer.from_huggingface(folder)
    assert (caught.value.code, words in str(caught.value)) == (code, True), str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.pop(),  # a file that puts a space before the text and does not take it away again
        lambda parts: parts.append(STRIP),
        lambda parts: parts[3].update(stop=1),
        lambda parts: parts[0].update(content="_"),
    ],
)
def test_a_decoder_that_is_not_the_inverse_of_encoding_is_refused(tmp_path: Path, change: Callable[[list], None]):
    content, _ = folder_content(tiny_sentencepiece())
    change(content["decoder"]["decoders"])  # type: ignore[index]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match="Unsupported: decoder: expected Replace ByteFallback Fuse Strip, got"):
        Tokenizer.from_huggingface(tmp_path)


def test_the_folder_without_a_fault_is_read(tmp_path: Path):
    tokenizer = Tokenizer.from_huggingface(folder_of(tmp_path, lambda files: None))
    assert tokenizer.encode("hello") == [260, 258, ord("o")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, {261})
