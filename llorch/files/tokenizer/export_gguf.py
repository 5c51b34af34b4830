"""Conversion of a Hugging Face folder's tokenizer to GGUF metadata, so that llama.cpp gives the same ids.

Keys under `llorch.files.tokenizer` store settings for which GGUF has no key; llama.cpp ignores them.

Source: llama.cpp conversion/base.py (`get_vocab_base`, `_set_vocab_gpt2`) and gguf-py SpecialVocab (keys); src/
llama-vocab.cpp (what the keys do).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models

from llorch.files.strict_json import read_json, read_settings
from llorch.files.tokenizer.byte_level import PRE_TOKENIZERS
from llorch.files.tokenizer.chat import read_templates, templates_metadata
from llorch.files.tokenizer.gguf_table import TokenType
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.files.tokenizer.merges import scores_of_merges
from llorch.files.tokenizer.pipeline import name_of_words, read_template
from llorch.files.tokenizer.sentencepiece import BYTE_TOKEN
from llorch.files.tokenizer.special import END_TEXTS
from llorch.files.tokenizer.tokenizer import Tokenizer, require_rows
from llorch.runtime.errors import FormatError

_MAX_TOKENIZER = 64 << 20  # bytes
PREFIX = "tokenizer.ggml."
NORMALIZER, SPACE_PREFIX = "llorch.files.tokenizer.normalizer", "llorch.files.tokenizer.space_prefix"
_LLAMA_CPP = "llama.cpp puts a space before every text and after each special token"
_METASPACE_NOTES = {
    "first": f"the folder puts a space only before a text that does not begin with a space; {_LLAMA_CPP}",
    "always": f"the folder puts no space before a text that begins with a space; {_LLAMA_CPP}",
}
Vocabulary = GGUFVocabulary | HuggingFaceVocabulary
# Texts that a converted tokenizer must encode like its source; else the conversion fails.
PROBES = (
    "",
    " ",
    "Hello, world! It's 2024, isn't it? I'LL BE",
    "  two  spaces\n\n\ttabs\r\nand lines  ",
    "def f(x):\n    return x ** 2 + 12345.678\n",
    "\u00fcber na\u00efve \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u041f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469 \u2028 \ufffd",
    "a" * 9 + " " * 7 + "1" * 11 + "!" * 5,
)


@dataclass
class GGUFTokenizer:
    """Tokenizer metadata of a GGUF file."""

    metadata: dict[str, object]
    notes: list[str] = field(default_factory=list)  # differences between llama.cpp and the folder


def read_tokenizer(folder: Path, rows: int) -> GGUFTokenizer:
    """Convert a folder's tokenizer to metadata and notes; ids without a token, below `rows`, become padding tokens."""
    vocabulary = HuggingFaceVocabulary(folder)  # raises for unknown parts
    path = folder / "tokenizer.json"
    content: dict[str, Any] = read_json(path, limit=_MAX_TOKENIZER)
    config = read_settings(folder / "tokenizer_config.json")
    byte_level = content["model"].get("byte_fallback") is not True
    tokenizer = GGUFTokenizer({})
    texts, types = _token_table(content, vocabulary, rows, path)
    tokenizer.metadata |= {
        PREFIX + "model": "gpt2" if byte_level else "llama",
        PREFIX + "pre": _pre_tokenizer(content, path) if byte_level else "default",
        PREFIX + "tokens": [text.encode() for text in texts],
        PREFIX + "token_type": np.array(types, np.int32),
    }
    if byte_level:
        tokenizer.metadata[PREFIX + "merges"] = [" ".join(pair).encode() for pair in _merges(content)]
    else:
        tokenizer.metadata[PREFIX + "scores"] = _token_scores(content, texts, types, path)
    _add_special(tokenizer, folder, content, config, vocabulary)
    _add_spaces(tokenizer, vocabulary, content)
    tokenizer.metadata |= templates_metadata(read_templates(folder))
    _note_switches(tokenizer, content)
    _complete_and_check(tokenizer, vocabulary, path)
    return tokenizer


def require_same_ids(source: Vocabulary, target: Vocabulary, texts: Iterable[str] = PROBES, *, path: Path) -> None:
    """Raise Unsupported for the first text that two vocabularies encode differently."""
    for text in texts:
        expected, actual = (Tokenizer(vocabulary).encode(text) for vocabulary in (source, target))
        if actual != expected:
            message = f"tokenizer: the target would encode {text!r} as {actual[:20]}, the source has {expected[:20]}"
            raise FormatError("Unsupported", message, path=path)


def probes_for(metadata: Mapping[str, object]) -> list[str]:
    """Return the probes that both vocabularies must encode equally: without leading spaces if these differ."""
    return [text for text in PROBES if SPACE_PREFIX not in metadata or not text.startswith(" ")]


def _token_table(
    content: Mapping[str, Any], vocabulary: HuggingFaceVocabulary, rows: int, path: Path
) -> tuple[list[str], list[TokenType]]:
    texts: dict[int, str] = {}
    types: dict[int, TokenType] = {}
    fallback, unknown = content["model"].get("byte_fallback"), content["model"].get("unk_token")
    for text, token_id in content["model"]["vocab"].items():
        texts[token_id] = text
        types[token_id] = TokenType.BYTE if fallback and BYTE_TOKEN.fullmatch(text) else TokenType.NORMAL
    merged_texts = {left + right for left, right in _merges(content)}
    for entry in content["added_tokens"]:
        token_id, text = entry["id"], entry["content"]
        texts[token_id] = text
        if text in merged_texts and text in END_TEXTS:
            continue  # "</s>" of Qwen: a normal token, because merges produce it; llama.cpp recognises it by text
        is_hidden = token_id in vocabulary.special.hidden
        types[token_id] = TokenType.CONTROL if is_hidden else TokenType.USER_DEFINED
    if fallback and unknown is not None:
        types |= {token_id: TokenType.UNKNOWN for token_id, text in texts.items() if text == unknown}
    require_rows(texts, rows, path=path)
    row_ids = range(rows)
    return [texts.get(i, f"[PAD{i}]") for i in row_ids], [types.get(i, TokenType.UNUSED) for i in row_ids]


def _pre_tokenizer(content: Mapping[str, Any], path: Path) -> str:
    """Return llama.cpp's name of a pre-tokenizer that `HuggingFaceVocabulary` supports."""
    name = str(name_of_words(content["pre_tokenizer"]))
    ignores = content["model"].get("ignore_merges") is True
    if name == "llama-bpe" and not ignores:
        return "smaug-bpe"  # in llama.cpp: the words of llama-bpe, without ignore_merges
    if ignores != PRE_TOKENIZERS[name].ignore_merges and (unmerged := _unmerged_tokens(content)):
        message = f"ignore_merges: llama.cpp has it {'off' if ignores else 'on'} for {name}, got {ignores}"
        effect = f"this changes {len(unmerged)} tokens that no merges produce, such as {unmerged[0]!r}"
        raise FormatError("Unsupported", f"{message}; {effect}", path=path)
    return name


def _unmerged_tokens(content: Mapping[str, Any]) -> list[str]:
    """Return the tokens that merges do not produce from their bytes."""
    ids = content["model"]["vocab"]
    encoder = Library(models.BPE(ids, _merges(content)))
    special = {entry["content"] for entry in content["added_tokens"]}
    texts = [text for text in ids if text not in special]
    encodings = encoder.encode_batch(texts, add_special_tokens=False)
    return [text for text, encoding in zip(texts, encodings, strict=True) if encoding.ids != [ids[text]]]


def _merges(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [merge.partition(" ")[::2] if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def _token_scores(
    content: Mapping[str, Any], texts: Sequence[str], types: Sequence[TokenType], path: Path
) -> np.ndarray:
    """Return scores that are equivalent to the file's merges, by token id; other tokens get the lowest score."""
    normal = {text for text, kind in zip(texts, types, strict=True) if kind is TokenType.NORMAL}
    merges = [(left, right) for left, right in _merges(content) if {left, right, left + right} <= normal]
    scores = scores_of_merges(merges, normal, path=path)
    lowest = min(scores.values(), default=0.0) - 1
    return np.array([scores.get(text, lowest) for text in texts], np.float32)


def _add_special(
    tokenizer: GGUFTokenizer,
    folder: Path,
    content: Mapping[str, Any],
    config: Mapping[str, Any],
    vocabulary: HuggingFaceVocabulary,
) -> None:
    """Add the ids of special tokens to a GGUF tokenizer, and whether BOS and EOS are added to texts."""
    path = folder / "tokenizer.json"
    ids = content["model"]["vocab"] | {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    model, generation = read_settings(folder / "config.json"), read_settings(folder / "generation_config.json")
    first, last = read_template(content.get("post_processor"), path)
    roles = {"bos": _single(first, "before", path), "eos": _single(last, "after", path)}
    adds = {role: token_id is not None for role, token_id in roles.items()}
    roles["bos"] = vocabulary.special.bos_token_id if roles["bos"] is None else roles["bos"]
    for role, key in (("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        options = [ids.get(_token_text(config.get(f"{key}_token")))]
        options += [_first_id(values.get(f"{key}_token_id"), vocabulary.vocab_size) for values in (generation, model)]
        roles.setdefault(role, None)
        roles[role] = next((token_id for token_id in [roles[role], *options] if token_id is not None), None)
    for role, token_id in roles.items():
        if token_id is not None:
            tokenizer.metadata[f"{PREFIX}{role}_token_id"] = int(token_id)
    for role, is_added in adds.items():
        tokenizer.metadata[f"{PREFIX}add_{role}_token"] = is_added
        if config.get(f"add_{role}_token", is_added) != is_added:
            message = f"tokenizer_config.json says add_{role}_token {not is_added}, tokenizer.json says the opposite"
            tokenizer.notes.append(message + "; llorch follows tokenizer.json")


def _single(ids: Sequence[object], side: str, path: Path) -> int | None:
    """Return the only id, None for no id; Unsupported for several, because llama.cpp adds at most one."""
    if len(ids) > 1:
        message = f"post_processor: llama.cpp puts at most one token {side} a text, got {ids}"
        raise FormatError("Unsupported", message, path=path)
    return int(str(ids[0])) if ids else None


def _token_text(token: object) -> str:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _first_id(value: object, vocab_size: int) -> int | None:
    """Return an id, or the first of a list; None for a value that is no id of the vocabulary, such as -1."""
    value = value[0] if isinstance(value, list) and value else value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size:
        return value
    return None


def _add_spaces(tokenizer: GGUFTokenizer, vocabulary: HuggingFaceVocabulary, content: Mapping[str, Any]) -> None:
    """Store normalisation and added spaces; note where llama.cpp differs."""
    if content.get("normalizer") == {"type": "NFC"}:
        tokenizer.metadata[NORMALIZER] = "NFC"
        tokenizer.notes.append("the folder composes characters first (NFC), llama.cpp does not")
    if tokenizer.metadata[PREFIX + "model"] == "llama":
        tokenizer.metadata[PREFIX + "add_space_prefix"] = vocabulary.space_prefix != "never"
    match content.get("pre_tokenizer"):
        case {"type": "Metaspace", "prepend_scheme": str(scheme)} if scheme in _METASPACE_NOTES:
            tokenizer.metadata[SPACE_PREFIX] = scheme
            tokenizer.notes.append(_METASPACE_NOTES[scheme])


def _note_switches(tokenizer: GGUFTokenizer, content: Mapping[str, Any]) -> None:
    for switch in ("lstrip", "rstrip", "single_word"):
        texts = [entry["content"] for entry in content["added_tokens"] if entry.get(switch)]
        if texts:
            listed = ", ".join(texts[:4])
            tokenizer.notes.append(f"{len(texts)} added tokens have {switch}, which llama.cpp ignores: {listed}")


def _complete_and_check(tokenizer: GGUFTokenizer, vocabulary: HuggingFaceVocabulary, path: Path) -> None:
    """Add end tokens that the metadata lack, note those without a free key; Unsupported if token ids differ."""
    reread = GGUFVocabulary(tokenizer.metadata, path)
    free_roles = [role for role in ("eot", "eom") if f"{PREFIX}{role}_token_id" not in tokenizer.metadata]
    missing = sorted(vocabulary.special.eos_token_ids - reread.special.eos_token_ids)
    for role, token_id in zip(free_roles, missing, strict=False):
        tokenizer.metadata[f"{PREFIX}{role}_token_id"] = token_id
    if len(missing) > len(free_roles):
        unlisted = ", ".join(map(str, missing[len(free_roles) :]))
        tokenizer.notes.append(f"a GGUF file holds at most three end tokens; llama.cpp will not stop at {unlisted}")
    require_same_ids(vocabulary, reread, probes_for(tokenizer.metadata), path=path)
