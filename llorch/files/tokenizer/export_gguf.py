"""The tokenizer of a Hugging Face folder as the metadata of a GGUF file, so that llama.cpp gives the same ids.

Keys under `llorch.files.tokenizer` keep what GGUF has no key for; llama.cpp skips them, a conversion back reads them.

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
# What a converted tokenizer must encode as its source does, before the conversion counts as done.
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
    """What goes into a GGUF file."""

    metadata: dict[str, object]
    notes: list[str] = field(default_factory=list)  # where llama.cpp will differ from the folder


def read_tokenizer(folder: Path, rows: int) -> GGUFTokenizer:
    """Translate a folder's tokenizer to metadata, ids filled up to `rows` of the embedding, and notes for the user."""
    vocabulary = HuggingFaceVocabulary(folder)  # refuses all that is not known
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
    _check(tokenizer, vocabulary, path)
    return tokenizer


def require_same_ids(source: Vocabulary, target: Vocabulary, texts: Iterable[str] = PROBES, *, path: Path) -> None:
    """Refuse (Unsupported) to convert a vocabulary to one that encodes a text differently, naming the first."""
    for text in texts:
        expected, actual = (Tokenizer(vocabulary).encode(text) for vocabulary in (source, target))
        if actual != expected:
            message = f"tokenizer: the target would encode {text!r} as {actual[:20]}, the source has {expected[:20]}"
            raise FormatError("Unsupported", message, path=path)


def probes_for(metadata: Mapping[str, object]) -> list[str]:
    """Return the probes whose ids both share: none with a leading space that the folder treats otherwise."""
    return [text for text in PROBES if SPACE_PREFIX not in metadata or not text.startswith(" ")]


def _token_table(
    content: Mapping[str, Any], vocabulary: HuggingFaceVocabulary, rows: int, path: Path
) -> tuple[list[str], list[TokenType]]:
    """Return the text and the type of every token id."""
    texts: dict[int, str] = {}
    types: dict[int, TokenType] = {}
    fallback, unknown = content["model"].get("byte_fallback"), content["model"].get("unk_token")
    for text, token_id in content["model"]["vocab"].items():
        texts[token_id] = text
        types[token_id] = TokenType.BYTE if fallback and BYTE_TOKEN.fullmatch(text) else TokenType.NORMAL
    made = {left + right for left, right in _merges(content)}
    for entry in content["added_tokens"]:
        token_id, text = entry["id"], entry["content"]
        texts[token_id] = text
        if text in made and text in END_TEXTS:
            continue  # "</s>" of Qwen: normal in the file, since merges make it; llama.cpp knows it by its text
        hidden = token_id in vocabulary.special.hidden
        types[token_id] = TokenType.CONTROL if hidden else TokenType.USER_DEFINED
    if fallback and unknown is not None:
        types |= {token_id: TokenType.UNKNOWN for token_id, text in texts.items() if text == unknown}
    require_rows(texts, rows, path=path)
    every = range(rows)
    return [texts.get(i, f"[PAD{i}]") for i in every], [types.get(i, TokenType.UNUSED) for i in every]


def _pre_tokenizer(content: Mapping[str, Any], path: Path) -> str:
    """Return llama.cpp's name of a pre-tokenizer, one that `HuggingFaceVocabulary` knows."""
    name = str(name_of_words(content["pre_tokenizer"]))
    ignores = content["model"].get("ignore_merges") is True
    if name == "llama-bpe" and not ignores:
        return "smaug-bpe"  # the same words
    if ignores != PRE_TOKENIZERS[name].ignore_merges and (beyond := _beyond_merges(content)):
        message = f"ignore_merges: llama.cpp has it {'off' if ignores else 'on'} for {name}, got {ignores}"
        matters = f"this changes {len(beyond)} tokens that no merges produce, such as {beyond[0]!r}"
        raise FormatError("Unsupported", f"{message}; {matters}", path=path)
    return name


def _beyond_merges(content: Mapping[str, Any]) -> list[str]:
    """Find the tokens that merges do not make from their own bytes."""
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
    """Return scores that give the file's merges in their order; other tokens get the lowest."""
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
    """Add the ids of special tokens to a GGUF tokenizer, and whether texts begin and end with them."""
    path = folder / "tokenizer.json"
    ids = content["model"]["vocab"] | {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    model, generation = read_settings(folder / "config.json"), read_settings(folder / "generation_config.json")
    first, last = read_template(content.get("post_processor"), path)
    roles = {"bos": _single(first, "before", path), "eos": _single(last, "after", path)}
    adds = {role: token_id is not None for role, token_id in roles.items()}
    roles["bos"] = vocabulary.special.bos_token_id if roles["bos"] is None else roles["bos"]
    for role, key in (("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        named = [ids.get(_token_text(config.get(f"{key}_token")))]
        named += [_first_id(values.get(f"{key}_token_id"), vocabulary.vocab_size) for values in (generation, model)]
        roles.setdefault(role, None)
        roles[role] = next((token_id for token_id in [roles[role], *named] if token_id is not None), None)
    for role, token_id in roles.items():
        if token_id is not None:
            tokenizer.metadata[f"{PREFIX}{role}_token_id"] = int(token_id)
    for role, wanted in adds.items():
        tokenizer.metadata[f"{PREFIX}add_{role}_token"] = wanted
        if config.get(f"add_{role}_token", wanted) != wanted:
            message = f"tokenizer_config.json says add_{role}_token {not wanted}, tokenizer.json says the opposite"
            tokenizer.notes.append(message + "; llorch follows tokenizer.json")


def _single(ids: Sequence[object], where: str, path: Path) -> int | None:
    """Return the only id, None for no id; refuse several, since llama.cpp adds at most one."""
    if len(ids) > 1:
        message = f"post_processor: llama.cpp puts at most one token {where} a text, got {ids}"
        raise FormatError("Unsupported", message, path=path)
    return int(str(ids[0])) if ids else None


def _token_text(token: object) -> str:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _first_id(value: object, vocab_size: int) -> int | None:
    """Return an id, or the first of a list; None for all that is no id of the vocabulary, such as -1."""
    value = value[0] if isinstance(value, list) and value else value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size:
        return value
    return None


def _add_spaces(tokenizer: GGUFTokenizer, vocabulary: HuggingFaceVocabulary, content: Mapping[str, Any]) -> None:
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


def _check(tokenizer: GGUFTokenizer, vocabulary: HuggingFaceVocabulary, path: Path) -> None:
    """Read the metadata back, and compare ends and ids."""
    back = GGUFVocabulary(tokenizer.metadata, path)
    spare = [role for role in ("eot", "eom") if f"{PREFIX}{role}_token_id" not in tokenizer.metadata]
    missing = sorted(vocabulary.special.eos_token_ids - back.special.eos_token_ids)
    for role, token_id in zip(spare, missing, strict=False):
        tokenizer.metadata[f"{PREFIX}{role}_token_id"] = token_id
    if len(missing) > len(spare):
        left = ", ".join(map(str, missing[len(spare) :]))
        tokenizer.notes.append(f"a GGUF file holds at most three end tokens; llama.cpp will not stop at {left}")
    require_same_ids(vocabulary, back, probes_for(tokenizer.metadata), path=path)
