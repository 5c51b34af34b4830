"""Known parts of a tokenizer.json; others are Unsupported.

An invalid pattern makes the regular expression engine of the `tokenizers` library panic, and a slow pattern makes it
hang. So no part of a file is passed to the library: it is compared with known parts, and the known part is passed.

Source: tokenizers `src/pre_tokenizers`, `src/normalizers`, `src/processors` (names and fields of the parts).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llorch.files.tokenizer.sentencepiece import SPACE
from llorch.files.tokenizer.special import SpacePrefix
from llorch.runtime.errors import FormatError, cut

Json = dict[str, Any]
_ABSENT = object()  # value of a field that is absent
_EXCERPT = 40  # characters of a text in an error


def sequence(kind: str, *parts: Json) -> Json:
    """Return a sequence of pipeline parts, in the format of tokenizer.json."""
    return {"type": "Sequence", kind: list(parts)}


def _word_splitter(pattern: str) -> Json:
    """Return the part that splits text by a regular expression and maps words to the byte alphabet."""
    splitter = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return sequence("pretokenizers", splitter, BYTE_LEVEL)


BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS_OF_GPT_2 = BYTE_LEVEL | {"use_regex": True}
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (  # words end before a change from lower to upper case; `%s` is an optional suffix
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {  # by llama.cpp's name
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
    """Return the part that replaces spaces by U+2581 and adds one in front, by a scheme."""
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


def name_of_words(pre_tokenizer: object) -> str | None:
    """Return the key of `WORDS` for a byte-level pre-tokenizer; None if it is unknown."""
    part = _with_defaults(pre_tokenizer)
    return next((name for name, words in WORDS.items() if words == part), None)


class Pipeline:
    """Known normalizer, pre-tokenizer and decoder of a file."""

    def __init__(self, content: Mapping[str, object], path: Path) -> None:
        """Recognise the parts; Unsupported for an unknown part or combination."""
        words, normalizer = content.get("pre_tokenizer"), content.get("normalizer")
        name = name_of_words(words)
        self.byte_level = name is not None
        self.space_prefix: SpacePrefix = "never" if name else "always"
        if name:
            splitter, allowed = WORDS[name], [None, {"type": "NFC"}]
        else:
            splitter = _expect(_with_defaults(words), [None, *map(metaspace, _PREFIXES)], "pre_tokenizer", path)
            allowed = [None if splitter else SPACES_TO_METASPACE]
        if splitter and not name:
            self.space_prefix = _PREFIXES[splitter["prepend_scheme"]]
        self._parts = {"pre_tokenizer": splitter, "normalizer": _expect(normalizer, allowed, "normalizer", path)}
        self._check_decoder(content.get("decoder"), path)

    def tokenizer(self) -> Tokenizer:
        """Build these parts in the library, around an empty model."""
        model = {"type": "BPE", "vocab": {}, "merges": []}
        return Tokenizer.from_str(json.dumps(self._parts | {"model": model}))

    def _check_decoder(self, decoder: object, path: Path) -> None:
        """Raise Unsupported for a decoder that is not the inverse of encoding."""
        if self.byte_level:
            kind = {"type": decoder.get("type")} if isinstance(decoder, dict) else decoder
            _expect(kind, [{"type": "ByteLevel"}], "decoder", path)
        else:
            strip = [TAKES_SPACE] if self.space_prefix != "never" else []
            _expect(decoder, [sequence("decoders", *METASPACE_DECODERS, *strip)], "decoder", path)


def _expect(part: object, known_parts: Sequence[Json | None], subject: str, path: Path) -> Json | None:
    """Return the known part that equals a part; Unsupported names the first field that differs from the nearest."""
    if part in known_parts:
        return known_parts[known_parts.index(part)]
    candidates = [*filter(None, known_parts), *WORDS.values()] if subject == "pre_tokenizer" else known_parts
    field, expected, actual = _first_difference(part, candidates)
    known_models = "llorch has the tokenizers of Llama 2, 3 and 4, Qwen 2 and 3.5, Tekken, SmolLM2 and GPT-2"
    message = f"{subject}{field}: expected {expected}, got {actual}; {known_models}"
    raise FormatError("Unsupported", message, path=path)


def _first_difference(part: object, known_parts: Sequence[Json | None]) -> tuple[str, str, str]:
    """Return path, expected and actual value of the first field that differs from the nearest known part."""
    actual_fields = dict(_scalar_fields(part))

    def nearness(candidate: dict[str, object]) -> tuple[int, int]:
        different = {key for key, _ in candidate.items() ^ actual_fields.items()}
        return -len(different), max(
            (_common_start(candidate.get(key), actual_fields.get(key)) for key in different), default=0
        )

    nearest = max((dict(_scalar_fields(candidate)) for candidate in known_parts), key=nearness)
    fields = [
        key for key in {**nearest, **actual_fields} if nearest.get(key, _ABSENT) != actual_fields.get(key, _ABSENT)
    ]
    if "" in nearest or not fields:  # no part expected, or a key looks like a path
        return "", "nothing" if "" in nearest else "other keys", cut(repr(part))
    field = fields[0]
    expected, actual = nearest.get(field, _ABSENT), actual_fields.get(field, _ABSENT)
    position = _common_start(expected, actual)
    return field, _excerpt(expected, position), _excerpt(actual, position)


def _common_start(first: object, second: object) -> int:
    """Count the characters that two values have in common at the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(str(first), str(second), strict=False)))


def _scalar_fields(part: object, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in a part with its path, such as `.pretokenizers[0].type`."""
    if isinstance(part, dict | list) and part:
        fields = sorted(part, key=lambda key: key != "type") if isinstance(part, dict) else range(len(part))
        for key in fields:
            value = part[key]
            yield from _scalar_fields(value, f"{field}.{key}" if isinstance(part, dict) else f"{field}[{key}]")
    else:
        yield field, str(part) if isinstance(part, dict | list) else part


def _excerpt(value: object, position: int) -> str:
    """Format a value for a message; of a long text only the part around a position."""
    if not isinstance(value, str) or len(value) <= _EXCERPT:
        return "nothing" if value is _ABSENT else repr(value)
    start = max(0, position - _EXCERPT // 4)
    prefix, suffix = "..." * (start > 0), "..." * (start + _EXCERPT < len(value))
    return f"{prefix}{value[start : start + _EXCERPT]}{suffix} (character {position})"


def _with_defaults(part: object) -> object:
    """Add defaults that old files omit, and replace settings that do not change ids."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence" and isinstance(part.get("pretokenizers"), list):
        return {**part, "pretokenizers": [_with_defaults(inner) for inner in part["pretokenizers"]]}
    if part.get("type") == "ByteLevel":
        return {"use_regex": True} | part | {"trim_offsets": True}
    return part


def read_template(processor: object, path: Path) -> tuple[list[object], list[object]]:
    """Read the ids that a file's `post_processor` adds before and after a text."""
    match processor:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence", "processors": [*inner]}:
            templates = [ids for ids in (read_template(part, path) for part in inner) if ids != ([], [])]
            if len(templates) > 1:  # the library would use the tokens of one of them only
                raise FormatError("Unsupported", "post_processor: expected one TemplateProcessing, got more", path=path)
            return templates[0] if templates else ([], [])
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
                    case {"ids": [*token_ids]}:
                        ids += token_ids
                        continue
        message = f"post_processor: expected the text A or one of the special tokens, got {step!r}"
        raise FormatError("Malformed", message, path=path)
    if len(texts) != 1:
        message = f"post_processor: expected the text once in the template, got the text {len(texts)} times"
        raise FormatError("Malformed", message, path=path)
    return ids[: texts[0]], ids[texts[0] :]
