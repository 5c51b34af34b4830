"""The parts of a tokenizer.json that are known here, and nothing else.

A pattern that the regular expression engine does not like makes the `tokenizers` library panic, and a slow one makes
it hang. So no part of a file is handed to the library: it is compared with the known ones, and built anew.

Source: tokenizers `src/pre_tokenizers`, `src/normalizers`, `src/processors` (names and fields of the parts).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from llorch.errors import FormatError
from llorch.tokenizer.sentencepiece import SPACE
from llorch.tokenizer.special import SpacePrefix

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3_WORDS = _WORDS % "{1,3}"
QWEN_2_WORDS = _WORDS % ""


def sequence(kind: str, *parts: Mapping[str, object]) -> dict[str, object]:
    """Parts one after the other, as a file has them."""
    return {"type": "Sequence", kind: list(parts)}


def split(pattern: str) -> dict[str, object]:
    """Words cut by an expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def metaspace(scheme: str) -> dict[str, object]:
    """Spaces written as U+2581, one put in front by a scheme."""
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


_DIGITS: dict[str, object] = {"type": "Digits", "individual_digits": True}
_BYTE_LEVEL_PARTS = (
    _byte_level(use_regex=True),  # GPT-2
    sequence("pretokenizers", _DIGITS, _byte_level(use_regex=True)),  # SmolLM2
    sequence("pretokenizers", split(LLAMA_3_WORDS), _byte_level(use_regex=False)),
    sequence("pretokenizers", split(QWEN_2_WORDS), _byte_level(use_regex=False)),
)
_METASPACE_PARTS: dict[str, SpacePrefix] = {"never": "never", "first": "start", "always": "always"}
SPACES_TO_METASPACE = sequence(
    "normalizers",
    {"type": "Prepend", "prepend": SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
)


METASPACE_DECODERS: list[dict[str, object]] = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
TAKES_SPACE: dict[str, object] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Pipeline:
    """Normalizer and pre-tokenizer of a file, rebuilt."""

    def __init__(self, normalizer: object, pre_tokenizer: object, path: Path) -> None:
        """Recognise the two parts; Unsupported for a part, or a combination, that is not known here."""
        words = _without_offsets(pre_tokenizer)
        self.byte_level = words in _BYTE_LEVEL_PARTS
        self.space_prefix: SpacePrefix = "never"
        self._normalizer: normalizers.Normalizer | None = None
        self._pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
        if self.byte_level:
            self._pre_tokenizer = _build(words)
            self._expect(normalizer, [None, {"type": "NFC"}], "normalizer", path)
            self._normalizer = normalizers.NFC() if normalizer else None
            return
        known = {scheme: metaspace(scheme) for scheme in _METASPACE_PARTS}
        self._expect(words, [None, *known.values()], "pre_tokenizer", path)
        self._expect(normalizer, [None if words else SPACES_TO_METASPACE], "normalizer", path)
        if isinstance(words, dict):
            scheme = str(words["prepend_scheme"])
            self.space_prefix = _METASPACE_PARTS[scheme]
            self._pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
        else:
            self.space_prefix = "always"
            parts = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
            self._normalizer = normalizers.Sequence(parts)

    def install(self, tokenizer: Tokenizer) -> None:
        """Put the two parts into a tokenizer, in place."""
        if self._normalizer is not None:
            tokenizer.normalizer = self._normalizer
        if self._pre_tokenizer is not None:
            tokenizer.pre_tokenizer = self._pre_tokenizer

    def check_decoder(self, decoder: object, path: Path) -> None:
        """Refuse (Unsupported) a decoder that gives another text than taking back what encoding did."""
        if self.byte_level:
            known = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
            expected = "ByteLevel"
        else:
            strip = [TAKES_SPACE] if self.space_prefix != "never" else []
            known = decoder == sequence("decoders", *METASPACE_DECODERS, *strip)
            expected = " ".join(str(part["type"]) for part in METASPACE_DECODERS + strip)
        if not known:
            raise FormatError("Unsupported", f"decoder: expected {expected}, got {_shown(decoder)}", path=path)

    def _expect(self, part: object, known: Sequence[object], what: str, path: Path) -> None:
        if part not in known:
            message = f"{what}: expected one of Llama 2, Llama 3, Qwen, SmolLM2 or GPT-2, got {_shown(part)}"
            raise FormatError("Unsupported", message, path=path)


def _shown(part: object) -> str:
    shown = repr(part)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _without_offsets(part: object) -> object:
    """Drop what does not change ids, and fill in the default that old files leave out."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence" and isinstance(part.get("pretokenizers"), list):
        return {**part, "pretokenizers": [_without_offsets(inner) for inner in part["pretokenizers"]]}
    if part.get("type") == "ByteLevel":
        return {"use_regex": True} | {key: value for key, value in part.items() if key != "trim_offsets"}
    return part


def _build(part: object) -> pre_tokenizers.PreTokenizer:
    match part:
        case {"type": "Sequence", "pretokenizers": [*inner]}:
            return pre_tokenizers.Sequence([_build(one) for one in inner])
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return pre_tokenizers.Split(Regex(pattern), "isolated")
        case {"type": "Digits"}:
            return pre_tokenizers.Digits(individual_digits=True)
        case {"type": "ByteLevel", "use_regex": bool(use_regex)}:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    raise AssertionError(part)  # only known parts come here


def read_template(processor: object, path: Path) -> tuple[list[object], list[object]]:
    """The ids that a file's `post_processor` puts before a text and after it."""
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
        message = f"post_processor: expected the text A or a special token of the list, got {step!r}"
        raise FormatError("Malformed", message, path=path)
    if len(texts) != 1:
        message = f"post_processor: expected the text once in the template, got it {len(texts)} times"
        raise FormatError("Malformed", message, path=path)
    return ids[: texts[0]], ids[texts[0] :]
