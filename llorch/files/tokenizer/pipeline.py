"""The parts of a tokenizer.json that are known here, and nothing else.

A pattern that the regular expression engine does not like makes the `tokenizers` library panic, and a slow one makes
it hang. So no part of a file is handed to the library: it is compared with the known ones, and the known one is.

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
_ABSENT = object()
_SHOWN = 40  # characters of a text that differs


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
            cutter = _expect(_in_full(words), [None, *map(metaspace, _PREFIXES)], "pre_tokenizer", path)
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
            kind = {"type": decoder.get("type")} if isinstance(decoder, dict) else decoder
            _expect(kind, [{"type": "ByteLevel"}], "decoder", path)
        else:
            strip = [TAKES_SPACE] if self.space_prefix != "never" else []
            _expect(decoder, [sequence("decoders", *METASPACE_DECODERS, *strip)], "decoder", path)


def _expect(part: object, known: Sequence[Json | None], what: str, path: Path) -> Json | None:
    """Return the known part that a part equals; Unsupported names the first field that differs from the nearest one."""
    if part in known:
        return known[known.index(part)]
    candidates = [*filter(None, known), *WORDS.values()] if what == "pre_tokenizer" else known
    field, expected, actual = _first_difference(part, candidates)
    known_models = "llorch has the tokenizers of Llama 2, 3 and 4, Qwen 2 and 3.5, Tekken, SmolLM2 and GPT-2"
    message = f"{what}{field}: expected {expected}, got {actual}; {known_models}"
    raise FormatError("Unsupported", message, path=path)


def _first_difference(part: object, known: Sequence[Json | None]) -> tuple[str, str, str]:
    """Return the path of the first field that differs from the nearest known part, what is expected there, and got."""
    actual_fields = dict(_scalar_fields(part))

    def nearness(candidate: dict[str, object]) -> tuple[int, int]:
        different = {key for key, _ in candidate.items() ^ actual_fields.items()}
        return -len(different), max(
            (_common_start(candidate.get(key), actual_fields.get(key)) for key in different), default=0
        )

    nearest = max((dict(_scalar_fields(candidate)) for candidate in known), key=nearness)
    fields = [
        key for key in {**nearest, **actual_fields} if nearest.get(key, _ABSENT) != actual_fields.get(key, _ABSENT)
    ]
    if "" in nearest or not fields:  # expected is no part; or a key of the file looks like a path
        return "", "nothing" if "" in nearest else "other keys", cut(repr(part))
    field = fields[0]
    expected, actual = nearest.get(field, _ABSENT), actual_fields.get(field, _ABSENT)
    place = _common_start(expected, actual)
    return field, _excerpt(expected, place), _excerpt(actual, place)


def _common_start(one: object, other: object) -> int:
    """Count the characters that two values have in common at the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(str(one), str(other), strict=False)))


def _scalar_fields(part: object, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in a part with its path, such as `.pretokenizers[0].type`."""
    if isinstance(part, dict | list) and part:
        fields = sorted(part, key=lambda key: key != "type") if isinstance(part, dict) else range(len(part))
        for key in fields:
            value = part[key]
            yield from _scalar_fields(value, f"{field}.{key}" if isinstance(part, dict) else f"{field}[{key}]")
    else:
        yield field, str(part) if isinstance(part, dict | list) else part


def _excerpt(value: object, place: int) -> str:
    """Format a value for a message; of a long text the part around a place."""
    if not isinstance(value, str) or len(value) <= _SHOWN:
        return "nothing" if value is _ABSENT else repr(value)
    start = max(0, place - _SHOWN // 4)
    before, after = "..." * (start > 0), "..." * (start + _SHOWN < len(value))
    return f"{before}{value[start : start + _SHOWN]}{after} (character {place})"


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
