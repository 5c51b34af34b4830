"""The parts of a tokenizer.json that are known here, and nothing else.

A pattern that the regular expression engine does not like makes the `tokenizers` library panic, and a slow one makes
it hang. So no part of a file is handed to the library: it is compared with the known ones, and the known one is.

Source: tokenizers `src/pre_tokenizers`, `src/normalizers`, `src/processors` (names and fields of the parts).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llorch.errors import FormatError
from llorch.tokenizer.sentencepiece import SPACE
from llorch.tokenizer.special import SpacePrefix

Json = dict[str, Any]


def sequence(kind: str, *parts: Json) -> Json:
    """Join parts of a pipeline, one after the other, as a file has them."""
    return {"type": "Sequence", kind: list(parts)}


def _word_splitter(pattern: str) -> Json:
    """Make the part that cuts text by a regular expression and writes words in the byte alphabet."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return sequence("pretokenizers", cut, BYTE_LEVEL)


BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS_OF_GPT_2 = BYTE_LEVEL | {"use_regex": True}
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (  # words that end where upper case follows lower case; `%s` may follow a word
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {  # by the name that llama.cpp has for them
    "gpt-2": _WORDS_OF_GPT_2,
    "smollm": sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, _WORDS_OF_GPT_2),
    "llama-bpe": _word_splitter(rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"),
    "qwen2": _word_splitter(rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS_AND_SPACES}"),
    "qwen35": _word_splitter(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama4": _word_splitter(
        _CASED.replace("%s", f"{_CONTRACTION}?") + rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS_AND_SPACES}"
    ),
    "tekken": _word_splitter(_CASED.replace("%s", "") + rf"|\p{{N}}|{_CASED_SYMBOLS_AND_SPACES}"),
}
_PREFIXES: dict[str, SpacePrefix] = {"never": "never", "first": "start", "always": "always"}  # by scheme of Metaspace
SPACES_TO_METASPACE = sequence(
    "normalizers",
    {"type": "Prepend", "prepend": SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
)
METASPACE_DECODERS: list[Json] = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
TAKES_SPACE: Json = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace(scheme: str) -> Json:
    """Make the part that writes spaces as U+2581, with one in front by a scheme."""
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


def name_of_words(pre_tokenizer: object) -> str | None:
    """Return the key of `WORDS` for a byte-level pre-tokenizer; None if it is unknown."""
    part = _in_full(pre_tokenizer)
    return next((name for name, known in WORDS.items() if known == part), None)


class Pipeline:
    """Normalizer, pre-tokenizer and decoder of a file, recognised."""

    def __init__(self, content: Mapping[str, object], path: Path) -> None:
        """Recognise the parts; Unsupported for a part, or a combination, that is not known here."""
        words, normalizer = content.get("pre_tokenizer"), content.get("normalizer")
        name = name_of_words(words)
        self.byte_level = name is not None
        self.space_prefix: SpacePrefix = "never" if name else "always"
        if name:
            cutter, known = WORDS[name], [None, {"type": "NFC"}]
        else:
            cutter = _expect(words, [None, *map(metaspace, _PREFIXES)], "pre_tokenizer", path)
            known = [None if cutter else SPACES_TO_METASPACE]
        if cutter and not name:
            self.space_prefix = _PREFIXES[cutter["prepend_scheme"]]
        self._parts = {"pre_tokenizer": cutter, "normalizer": _expect(normalizer, known, "normalizer", path)}
        self._check_decoder(content.get("decoder"), path)

    def tokenizer(self) -> Tokenizer:
        """Build these parts in the library, around an empty model."""
        model = {"type": "BPE", "vocab": {}, "merges": []}
        return Tokenizer.from_str(json.dumps(self._parts | {"model": model}))

    def _check_decoder(self, decoder: object, path: Path) -> None:
        """Refuse (Unsupported) a decoder that gives another text than taking back what encoding did."""
        if self.byte_level:
            known = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
            expected = "ByteLevel"
        else:
            strip = [TAKES_SPACE] if self.space_prefix != "never" else []
            known = decoder == sequence("decoders", *METASPACE_DECODERS, *strip)
            expected = " ".join(str(part["type"]) for part in METASPACE_DECODERS + strip)
        if not known:
            raise FormatError("Unsupported", f"decoder: expected {expected}, got {_shorten(decoder)}", path=path)


def _expect(part: object, known: Sequence[Json | None], what: str, path: Path) -> Json | None:
    if part not in known:
        message = (
            f"{what}: expected one of Llama 2, 3 or 4, Qwen 2 or 3.5, Tekken, SmolLM2 or GPT-2, got {_shorten(part)}"
        )
        raise FormatError("Unsupported", message, path=path)
    return known[known.index(part)]


def _shorten(part: object) -> str:
    """Format a part of a pipeline for a message, in at most 200 characters."""
    shown = repr(part)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _in_full(part: object) -> object:
    """Fill in what old files leave out, and what does not change ids."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence" and isinstance(part.get("pretokenizers"), list):
        return {**part, "pretokenizers": [_in_full(inner) for inner in part["pretokenizers"]]}
    if part.get("type") == "ByteLevel":
        return {"use_regex": True} | part | {"trim_offsets": True}
    return part


def read_template(processor: object, path: Path) -> tuple[list[object], list[object]]:
    """Read the ids that a file's `post_processor` puts before a text and after it."""
    match processor:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence", "processors": [*inner]}:
            around = [found for found in (read_template(one, path) for one in inner) if found != ([], [])]
            if len(around) > 1:  # the library then keeps the tokens of one of them only
                raise FormatError("Unsupported", "post_processor: expected one TemplateProcessing, got more", path=path)
            return around[0] if around else ([], [])
        case {"type": "TemplateProcessing", "single": [*steps], "special_tokens": {**tokens}}:
            return _read_steps(steps, tokens, path)
    kind = processor.get("type") if isinstance(processor, dict) else processor
    message = f"post_processor: expected TemplateProcessing, ByteLevel or both, got {kind!r}"
    raise FormatError("Unsupported", message, path=path)


def _read_steps(steps: list[object], tokens: dict[str, object], path: Path) -> tuple[list[object], list[object]]:
    """Read the special tokens before and after the text in a template of the post processor."""
    ids: list[object] = []
    texts = []
    for step in steps:
        match step:
            case {"Sequence": {"id": "A"}}:
                texts.append(len(ids))
                continue
            case {"SpecialToken": {"id": str(name)}}:
                match tokens.get(name):
                    case {"ids": [*known]}:
                        ids += known
                        continue
        message = f"post_processor: expected the text A or one of the special tokens, got {step!r}"
        raise FormatError("Malformed", message, path=path)
    if len(texts) != 1:
        message = f"post_processor: expected the text once in the template, got the text {len(texts)} times"
        raise FormatError("Malformed", message, path=path)
    return ids[: texts[0]], ids[texts[0] :]
