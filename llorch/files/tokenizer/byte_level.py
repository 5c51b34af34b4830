"""Byte-level BPE (GPT-2, Llama 3 and 4, Qwen, SmolLM2, Tekken): words by regular expression, then merges over bytes.

Each byte is mapped to one printable character, so a token's text has no space and no control character. A vocabulary
may lack some bytes: these are dropped, and no merge spans one, as in llama.cpp.

Source: llama.cpp src/llama-vocab.cpp, `llm_tokenizer_bpe` (the expression of each pre-tokenizer name).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

# Code points that Unicode 16 added. The `tokenizers` library knows them, llama.cpp (Unicode 15.1) treats them as
# unassigned; the ids of a GGUF file are those of llama.cpp.
_NEW_LETTERS_AND_DIGITS = (
    "1C89-1C8A A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D65 10D6F-10D85 10EC2-10EC4 11380-11389 1138B-1138B 1138E-1138E"
    " 11390-113B5 113B7-113B7 113D1-113D1 113D3-113D3 116D0-116E3 11BC0-11BE0 11BF0-11BF9 13460-143FA 16100-1611D"
    " 16130-16139 16D40-16D6C 16D70-16D79 18CFF-18CFF 1CCF0-1CCF9 1E5D0-1E5ED 1E5F0-1E5FA"
)
_NEW_MARKS = (
    "0897-0897 10D69-10D6D 10EFC-10EFC 113B8-113C0 113C2-113C2 113C5-113C5 113C7-113CA 113CC-113D0 113D2-113D2"
    " 113E1-113E2 11F5A-11F5A 1611E-1612F 1E5EE-1E5EF"
)
_NEW_PUNCTUATION = "1B4E-1B4F 1B7F-1B7F 10D6E-10D6E 113D4-113D5 113D7-113D8 11BE1-11BE1 16D6D-16D6F 1E5FF-1E5FF"


def _in_class(spans: str) -> str:
    """Convert hexadecimal code points, `1C89-1C8A A7CB`, to the inside of a regular expression's character class."""
    return re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", spans).replace(" ", "")


_NEW = _in_class(_NEW_LETTERS_AND_DIGITS)
_MARKS = _in_class(_NEW_MARKS)
_LETTER = rf"[\p{{L}}&&[^{_NEW}]]"
_UPPER = rf"[\p{{L}}&&[^{_NEW}a-z]]"  # letters but a to z: llama.cpp has case for ASCII letters only
_LOWER = rf"[\p{{L}}&&[^{_NEW}A-Z]]"
_LETTER_OR_MARK = rf"[\p{{L}}\p{{M}}&&[^{_NEW}{_MARKS}]]"
_DIGIT = rf"[\p{{N}}&&[^{_NEW}]]"
_SYMBOL = rf"[[^\s\p{{L}}\p{{N}}]{_NEW}]"
_SYMBOL_BUT_MARK = rf"[[^\s\p{{L}}\p{{M}}\p{{N}}]{_NEW}{_MARKS}]"
_PUNCTUATION = rf"[\p{{P}}$+<=>^~|&&[^{_in_class(_NEW_PUNCTUATION)}]]"
_BEFORE_LETTERS = rf"[[^\r\n\p{{L}}\p{{N}}]{_NEW}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = rf"{_CONTRACTION}|{_BEFORE_LETTERS}?{_LETTER}+"
_LLAMA_3 = rf"{_WORDS}|{_DIGIT}{{1,3}}| ?{_SYMBOL}+[\r\n]*|{_SPACES}"
_QWEN_2 = rf"{_WORDS}|{_DIGIT}| ?{_SYMBOL}+[\r\n]*|{_SPACES}"
_QWEN_3_5 = rf"{_CONTRACTION}|{_BEFORE_LETTERS}?{_LETTER_OR_MARK}+|{_DIGIT}| ?{_SYMBOL_BUT_MARK}+[\r\n]*|{_SPACES}"
_GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?{_DIGIT}+| ?{_SYMBOL}+|\s+(?!\S)|\s+"


def _cased_words(suffix: str, digits: str) -> str:
    """Return a pattern of words that end before a change from lower to upper case; `suffix` may follow a word."""
    words = rf"{_BEFORE_LETTERS}?{_UPPER}*{_LOWER}+{suffix}|{_BEFORE_LETTERS}?{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?{_SYMBOL}+[\r\n/]*|{_SPACES}"


_GPT_4O = _cased_words(f"{_CONTRACTION}?", f"{_DIGIT}{{1,3}}")
_TEKKEN = _cased_words("", _DIGIT)


@dataclass(frozen=True)
class PreTokenizer:
    """Settings that llama.cpp has for a name in `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]  # regular expressions, in the order of splitting
    ignore_merges: bool = False  # a word that is a token becomes it, even without merges
    adds_bos: bool = False  # default if the file has no setting


_OF_LLAMA_3 = PreTokenizer((_LLAMA_3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS = {
    "llama-bpe": _OF_LLAMA_3,
    "llama3": _OF_LLAMA_3,
    "llama-v3": _OF_LLAMA_3,
    "smaug-bpe": PreTokenizer((_LLAMA_3,)),
    "qwen2": PreTokenizer((_QWEN_2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN_2,)),
    "qwen35": PreTokenizer((_QWEN_3_5,)),
    "llama4": PreTokenizer((_GPT_4O,)),
    "gpt-4o": PreTokenizer((_GPT_4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "smollm": PreTokenizer((_DIGIT, _GPT_2)),
    "gpt-2": PreTokenizer((_GPT_2,)),
    "default": PreTokenizer((f"{_PUNCTUATION}+", _GPT_2, f"{_DIGIT}+", "[0-9][0-9][0-9]")),
}


def _byte_characters() -> dict[int, str]:
    """Map each byte to its printable character, as in GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(unprintable)}


BYTE_CHARACTERS = _byte_characters()
# Bytes that occur in UTF-8; a vocabulary may lack others.
TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
_BYTE_OF = {ord(character): chr(byte) for byte, character in BYTE_CHARACTERS.items()}


def text_bytes(token: str) -> bytes:
    """Map a token's text back to bytes; text outside the byte alphabet gives its UTF-8."""
    if all(ord(character) in _BYTE_OF for character in token):
        return token.translate(_BYTE_OF).encode("latin-1")
    return token.encode("utf-8", "surrogateescape")


class ByteLevelBPE:
    """Text encoder of a byte-level vocabulary."""

    def __init__(self, ids: Mapping[str, int], merges: Iterable[tuple[str, str]], words: PreTokenizer) -> None:
        """Build the encoder in the library.

        `ids` has no control tokens: text must not become one. `merges` are sorted by priority; `words` splits text.
        """
        model = models.BPE(vocab=dict(ids), merges=list(merges), ignore_merges=words.ignore_merges)
        parts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns
        ]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if missing := [BYTE_CHARACTERS[byte] for byte in TEXT_BYTES if BYTE_CHARACTERS[byte] not in ids]:
            parts.append(pre_tokenizers.Split(Regex(f"[{re.escape(''.join(missing))}]"), "removed"))
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)

    def encode_spans(self, text: str) -> tuple[list[int], Iterator[int]]:
        """Encode text without special tokens: ids, and the character index at which each starts."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # releases the GIL
        return encoding.ids, starts_in(encoding)


def starts_in(encoding: Encoding) -> Iterator[int]:
    """Yield the start of each token; lazy, because offsets are slow to read."""
    yield from (start for start, _ in encoding.offsets)
