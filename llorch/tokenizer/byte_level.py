"""Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): words by regular expression, then merges over bytes.

Each byte is written as one printable character, so a token's text holds no space and no control character.

Source: llama.cpp src/llama-vocab.cpp, `llm_tokenizer_bpe` (the expression of each pre-tokenizer name).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenizers import Encoding, Regex, Tokenizer, models, pre_tokenizers

# Letters and digits that Unicode 16 added. The `tokenizers` library knows them, llama.cpp (Unicode 15.1) takes them for
# unassigned; the ids of a GGUF file are those of llama.cpp.
_SPANS = (
    "1C89-1C8A A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D65 10D6F-10D85 10EC2-10EC4 11380-11389 1138B-1138B 1138E-1138E"
    " 11390-113B5 113B7-113B7 113D1-113D1 113D3-113D3 116D0-116E3 11BC0-11BE0 11BF0-11BF9 13460-143FA 16100-1611D"
    " 16130-16139 16D40-16D6C 16D70-16D79 18CFF-18CFF 1CCF0-1CCF9 1E5D0-1E5ED 1E5F0-1E5FA"
)
_NEW = re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", _SPANS).replace(" ", "")
_LETTER = rf"[\p{{L}}&&[^{_NEW}]]"
_DIGIT = rf"[\p{{N}}&&[^{_NEW}]]"
_SYMBOL = rf"[[^\s\p{{L}}\p{{N}}]{_NEW}]"
_BEFORE_LETTERS = rf"[[^\r\n\p{{L}}\p{{N}}]{_NEW}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])" + rf"|{_BEFORE_LETTERS}?{_LETTER}+"
_LLAMA_3 = rf"{_WORDS}|{_DIGIT}{{1,3}}| ?{_SYMBOL}+[\r\n]*|{_SPACES}"
_QWEN_2 = rf"{_WORDS}|{_DIGIT}| ?{_SYMBOL}+[\r\n]*|{_SPACES}"
_GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?{_DIGIT}+| ?{_SYMBOL}+|\s+(?!\S)|\s+"

# Expressions in the order in which they cut, by `tokenizer.ggml.pre`.
WORD_PATTERNS = {
    "llama-bpe": (_LLAMA_3,), "llama3": (_LLAMA_3,), "llama-v3": (_LLAMA_3,), "qwen2": (_QWEN_2,),
    "deepseek-r1-qwen": (_QWEN_2,), "smollm": (_DIGIT, _GPT_2), "gpt-2": (_GPT_2,),
}  # fmt: skip
# Llama 3 takes a word that is a token as it is, even where the merges would not lead to it, and starts with BOS.
LLAMA_3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def _byte_characters() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()
# Bytes that UTF-8 can have; a vocabulary may lack some of the others.
TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
_BYTE_OF = {ord(character): chr(byte) for byte, character in BYTE_CHARACTERS.items()}


def text_bytes(token: str) -> bytes:
    """Undo the byte alphabet; a text outside of it stands for its own UTF-8."""
    if all(ord(character) in _BYTE_OF for character in token):
        return token.translate(_BYTE_OF).encode("latin-1")
    return token.encode("utf-8", "surrogateescape")


class ByteLevelBPE:
    """The text encoder of a byte-level vocabulary."""

    def __init__(
        self, ids: Mapping[str, int], merges: Iterable[tuple[str, str]], *, patterns: Sequence[str], ignore_merges: bool
    ) -> None:
        """Build the encoder in the library.

        `ids` has no control tokens: no text may turn into one; merges come most important first; `patterns` cut text
        into words, one after the other; with `ignore_merges` a word that is a token is taken as it is.
        """
        model = models.BPE(vocab=dict(ids), merges=list(merges), ignore_merges=ignore_merges)
        words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, to_alphabet])

    def encode_spans(self, text: str) -> tuple[list[int], Iterator[int]]:
        """Encode text without special tokens: ids, and for each the character in which it starts."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # other threads go on
        return encoding.ids, starts_in(encoding)


def starts_in(encoding: Encoding) -> Iterator[int]:
    """Where tokens start, taken from the library only when somebody asks, which most callers do not."""
    yield from (start for start, _ in encoding.offsets)
