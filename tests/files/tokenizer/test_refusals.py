"""Faulty vocabularies: each is refused with its code, and the message names the place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.huggingface_folders import BYTE_LEVEL, Json, added_token, folder_content
from builders.vocabularies import tiny_byte_level, tiny_sentencepiece
from helpers.refusals import refuses

from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.pipeline import WORDS

Change = Callable[[dict], object]


def faulty(change: Change, code: str, *facts: str, id: str) -> Any:
    return pytest.param(change, code, facts, id=id)


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
    faulty(drop("model"), "Missing", "vocabulary", id="no model"),
    faulty(put("model", "no_vocab"), "Missing", "vocabulary", id="no_vocab"),
    faulty(put("model", "bert"), "Unsupported", "got 'bert'", id="model bert"),
    faulty(drop("tokens"), "Missing", "tokenizer.ggml.tokens", "nothing", id="no tokens"),
    faulty(put("tokens", []), "Missing", "tokenizer.ggml.tokens", "one", id="empty tokens"),
    faulty(put("tokens", np.zeros(3)), "Inconsistent", "got ndarray", id="tokens numbers"),
    faulty(put("tokens", "abc"), "Inconsistent", "got str", id="tokens one string"),
    faulty(set_item("tokens", 5, b"x" * 1025), "TooLarge", "got 1025", "token 5", id="token long"),
    faulty(set_item("tokens", 5, b"a"), "Duplicate", "'a' as token 5", id="token twice"),
    faulty(lambda m: m.update({"tokenizer.ggml.tokens": [b"a"] * 9}), "Duplicate", "'a' as token 0", id="equal"),
    faulty(put("eot_token_id", "2"), "Malformed", "tokenizer.ggml.eot_token_id", "got '2'", id="eot text"),
    faulty(put("add_eos_token", 1), "Malformed", "tokenizer.ggml.add_eos_token", "got 1", id="add_eos 1"),
    faulty(set_item("token_type", 3, 99), "OutOfRange", "got 99", "token 3", id="type 99"),
    faulty(set_item("token_type", 3, -1), "OutOfRange", "got -1", "token 3", id="type -1"),
    faulty(resize("token_type", 20), "Inconsistent", "got 20", id="types short"),
    faulty(resize("token_type", 900), "Inconsistent", "got 900", id="types long"),
    faulty(as_type("token_type", np.float32), "Inconsistent", "got float32", id="types floats"),
    faulty(put("token_type", [b"a"]), "Inconsistent", "got list", id="types strings"),
]
BYTE_LEVEL_ONLY = [
    faulty(drop("bos_token_id"), "Missing", "tokenizer.ggml.bos_token_id", id="no bos to add"),
    faulty(put("bos_token_id", 9999), "Missing", "tokenizer.ggml.bos_token_id", id="bos 9999"),
    faulty(put("pre", "(a+)+$"), "Unsupported", "qwen2", id="pre unknown"),
    faulty(drop("merges"), "Missing", "tokenizer.ggml.merges", id="no merges"),
    faulty(put("merges", np.zeros(2)), "Inconsistent", "got ndarray", id="merges numbers"),
    faulty(put("merges", [b"he"]), "Malformed", "got b'he'", "index 0", id="merge without space"),
    faulty(put("merges", [b"l l", b"h e l"]), "Malformed", "b'h e l'", "index 1", id="merge two spaces"),
    faulty(put("merges", [b" he"]), "Malformed", "got b' he'", id="merge left empty"),
    faulty(put("merges", [b"he "]), "Malformed", "got b'he '", id="merge right empty"),
    faulty(put("merges", [b"hx e"]), "Malformed", "got b'hx e'", id="merge left unknown"),
    faulty(put("merges", [b"h ex"]), "Malformed", "got b'h ex'", id="merge right unknown"),
    faulty(put("merges", [b"h h"]), "Malformed", "got b'h h'", id="merge result unknown"),
    faulty(put("merges", [b"l l", b"l l"]), "Duplicate", "b'l l'", "index 1", id="merge twice"),
    faulty(set_item("token_type", 256, 3), "Malformed", "got b'h e'", id="merge makes a control token"),
    faulty(set_item("tokens", 9, b"a\xff"), "Malformed", "got b'a\\xff'", "token 9", id="not UTF-8"),
]
SENTENCEPIECE_ONLY = [
    faulty(resize("scores", 30), "Inconsistent", "got 30", id="scores short"),
    faulty(as_type("scores", np.int8), "Inconsistent", "got int8", id="scores int8"),
    faulty(as_type("scores", np.float64), "Inconsistent", "got float64", id="scores float64"),
    faulty(set_item("scores", 260, np.nan), "NonFinite", "got nan", "token 260", id="score nan"),
    faulty(set_item("tokens", 8, b"<0xZZ>"), "Malformed", "got '<0xZZ>'", "token 8", id="byte ZZ"),
    faulty(set_item("tokens", 8, b"<0x-1>"), "Malformed", "got '<0x-1>'", "token 8", id="byte -1"),
    faulty(set_item("token_type", 13, 1), "Missing", "0x0A", id="byte absent"),
    faulty(put("add_space_prefix", "yes"), "Malformed", "tokenizer.ggml.add_space_prefix", "'yes'", id="prefix text"),
]


def refused(metadata: dict[str, object], change: Change, code: str, facts: tuple[str, ...]) -> None:
    change(metadata)
    with refuses(code, *facts) as caught:
        Tokenizer(GGUFVocabulary(metadata, "tiny.gguf"))
    assert str(caught.value).startswith(f"tiny.gguf: {code}: ")


@pytest.mark.parametrize(("change", "code", "facts"), BOTH + BYTE_LEVEL_ONLY)
def test_a_faulty_byte_level_vocabulary_is_refused(change: Change, code: str, facts: tuple[str, ...]):
    refused(tiny_byte_level(), change, code, facts)


@pytest.mark.parametrize(("change", "code", "facts"), BOTH + SENTENCEPIECE_ONLY)
def test_a_faulty_sentencepiece_vocabulary_is_refused(change: Change, code: str, facts: tuple[str, ...]):
    refused(tiny_sentencepiece(), change, code, facts)


def folder_of(tmp_path: Path, change: Change) -> Path:
    content, config = folder_content(tiny_byte_level())
    files = {"tokenizer.json": content, "tokenizer_config.json": config}
    files |= {"config.json": {}, "generation_config.json": {}}
    change(files)
    for name, value in files.items():
        if value is not None:
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return tmp_path


def edit(path: str, value: object) -> Change:
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
WORDS_OF_FOUR = WORDS["llama-bpe"]["pretokenizers"][0]["pattern"]["Regex"].replace("{1,3}", "{1,4}")
LIKE_PATHS = {f"pretokenizers[{i}]": part for i, part in enumerate(WORDS["smollm"]["pretokenizers"])}
PREFIXED = BYTE_LEVEL | {"add_prefix_space": True}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def two_templates(files: dict) -> None:
    processors = files["tokenizer.json"]["post_processor"]["processors"]
    processors.append(processors[1])


TEMPLATE = "post_processor/processors/1"
FOLDERS = [
    faulty(lambda files: files.update({"tokenizer.json": None}), "Missing", "tokenizer.json", id="no file"),
    faulty(lambda files: files.update({"tokenizer.json": "{"}), "Malformed", "JSON", id="cut"),
    faulty(lambda files: files.update({"tokenizer.json": "[]"}), "Malformed", "object", id="a list"),
    faulty(edit("pre_tokenizer/pretokenizers/0", SPLIT), "Unsupported", "pre_tokenizer.pretokenizers[0].pattern.Regex",
           "got '(a+)+$'", id="foreign regex"),
    faulty(edit("pre_tokenizer/pretokenizers/0/invert", True), "Unsupported", "pre_tokenizer.pretokenizers[0].invert",
           "expected False, got True", id="inverted split"),
    faulty(edit("pre_tokenizer/pretokenizers/0/pattern/Regex", WORDS_OF_FOUR), "Unsupported",
           "pre_tokenizer.pretokenizers[0].pattern.Regex", r"\p{N}{1,3}|", r"\p{N}{1,4}|",
           id="one character of a regex"),
    faulty(edit("pre_tokenizer/pretokenizers", [*WORDS["llama-bpe"]["pretokenizers"], BYTE_LEVEL]), "Unsupported",
           "pre_tokenizer.pretokenizers[2].type", "expected nothing, got 'ByteLevel'", id="one part more"),
    faulty(edit("pre_tokenizer", {"type": "Whitespace"}), "Unsupported", "pre_tokenizer.type", "got 'Whitespace'",
           id="foreign pre-tokenizer"),
    faulty(edit("pre_tokenizer", PREFIXED), "Unsupported", "pre_tokenizer.add_prefix_space", "expected False, got True",
           id="prefix space"),
    faulty(edit("pre_tokenizer", None), "Unsupported", "normalizer", id="no pre-tokenizer"),
    faulty(edit("pre_tokenizer", {"type": "Sequence", **LIKE_PATHS}), "Unsupported", "pre_tokenizer",
           "{'type': 'Sequence'", id="keys that look like paths"),
    faulty(edit("normalizer", {"type": "Lowercase"}), "Unsupported", "normalizer.type", "got 'Lowercase'",
           id="foreign normalizer"),
    faulty(edit("model", None), "Missing", "model", id="no model"),
    faulty(edit("model/type", "Unigram"), "Unsupported", "Unigram", id="unigram"),
    faulty(edit("model/dropout", 0.1), "Unsupported", "dropout", id="dropout"),
    faulty(edit("model/end_of_word_suffix", "</w>"), "Unsupported", "end_of_word_suffix", "got '</w>'", id="suffix"),
    faulty(edit("model/byte_fallback", True), "Unsupported", "byte_fallback", id="bytes twice"),
    faulty(edit("model/surprise", 1), "Unsupported", "surprise", id="unknown field"),
    faulty(edit("model/vocab", []), "Malformed", "vocab", id="vocab a list"),
    faulty(edit("model/vocab/he", "256"), "Malformed", "'he'", id="id a text"),
    faulty(edit("model/vocab/he", -1), "OutOfRange", "'he'", id="id -1"),
    faulty(edit("model/vocab/he", 1 << 40), "OutOfRange", "'he'", id="id huge"),
    faulty(edit("model/vocab/he", 257), "Duplicate", "257", id="id twice"),
    faulty(edit("model/merges", {}), "Malformed", "merges", id="merges an object"),
    faulty(edit("model/merges/0", "he"), "Malformed", "got 'he'", "index 0", id="merge without space"),
    faulty(edit("model/merges/0", ["h", "e", "l"]), "Malformed", "['h', 'e', 'l']", "index 0", id="merge of three"),
    faulty(edit("model/merges/0", 7), "Malformed", "got 7", id="merge a number"),
    faulty(edit("added_tokens", None), "Malformed", "added_tokens", id="no added tokens"),
    faulty(edit("added_tokens/0", "x"), "Malformed", "objects", id="added a text"),
    faulty(edit("added_tokens/0", added_token(260, "")), "Malformed", "text", id="added empty"),
    faulty(edit("added_tokens/0", added_token(999, "<x>")), "Inconsistent", "got 999", id="added id with a gap"),
    faulty(edit("added_tokens/0/special", "yes"), "Malformed", "special", id="special a text"),
    faulty(edit("post_processor", {"type": "Roberta"}), "Unsupported", "Roberta", id="foreign template"),
    faulty(lambda files: two_templates(files), "Unsupported", "one TemplateProcessing", id="two templates"),
    faulty(edit("decoder", None), "Unsupported", "decoder.type", "expected 'ByteLevel', got nothing", id="no decoder"),
    faulty(edit("decoder", STRIP), "Unsupported", "decoder.type", "expected 'ByteLevel', got 'Strip'",
           id="strip decoder"),
    faulty(edit(f"{TEMPLATE}/single", []), "Malformed", "0 times", id="template without text"),
    faulty(edit(f"{TEMPLATE}/single/0", 5), "Malformed", "got 5", id="template step"),
    faulty(edit(f"{TEMPLATE}/special_tokens", {}), "Malformed", "special", id="template token"),
    faulty(edit(f"{TEMPLATE}/special_tokens/<|begin_of_text|>/ids", [4096]), "OutOfRange", "4096", id="template id"),
    faulty(config("config.json", eos_token_id=265), "OutOfRange", "got 265", id="eos 265"),
    faulty(config("config.json", bos_token_id="1"), "Malformed", "bos_token_id", id="bos a text"),
    faulty(config("generation_config.json", eos_token_id=[1, 2.5]), "Malformed", "2.5", id="eos a float"),
    faulty(config("tokenizer_config.json", eos_token="<x>"), "Missing", "'<x>'", id="eos unknown"),
    faulty(config("tokenizer_config.json", eos_token=5), "Malformed", "got 5", id="eos a number"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "facts"), FOLDERS)
def test_a_faulty_folder_is_refused(tmp_path: Path, change: Change, code: str, facts: tuple[str, ...]):
    folder = folder_of(tmp_path, change)
    with refuses(code, *facts):
        Tokenizer.from_huggingface(folder)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        # a file that puts a space before the text and does not take it away again
        (lambda parts: parts.pop(), ("decoder.decoders[3].type", "expected 'Strip', got nothing")),
        (lambda parts: parts.append(STRIP), ("decoder.decoders[4].type", "expected nothing, got 'Strip'")),
        (lambda parts: parts[3].update(stop=1), ("decoder.decoders[3].stop", "expected 0, got 1")),
        (lambda parts: parts[0].update(content="_"), ("decoder.decoders[0].content", "expected ' ', got '_'")),
    ],
)
def test_a_decoder_that_is_not_the_inverse_of_encoding_is_refused(
    tmp_path: Path, change: Callable[[list], None], facts: tuple[str, ...]
):
    content, _ = folder_content(tiny_sentencepiece())
    change(content["decoder"]["decoders"])  # type: ignore[index]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with refuses("Unsupported", *facts):
        Tokenizer.from_huggingface(tmp_path)


def test_the_folder_without_a_fault_is_read(tmp_path: Path):
    tokenizer = Tokenizer.from_huggingface(folder_of(tmp_path, lambda files: None))
    assert tokenizer.encode("hello") == [260, 258, ord("o")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, {261})
