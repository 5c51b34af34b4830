"""Vocabularies for the tokenizer tests: two tiny ones made by hand, the real ones where they are at hand, and texts."""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fetch_vocabularies import MODEL
from fetch_vocabularies import NAMES as NAMES

from llorch.files.tokenizer.byte_level import BYTE_CHARACTERS

Encode = Callable[..., list[int]]
FOLDER_VARIABLE = "LLORCH_VOCABULARIES"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def real_vocabulary(name: str) -> Path:
    """The file of a real vocabulary; skips the test without it."""
    return _fetched(f"ggml-vocab-{name}.gguf")


def published_model() -> Path:
    """The file of a published model; skips the test without it."""
    return _fetched(MODEL)


def _fetched(name: str) -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"NOT RUN: {FOLDER_VARIABLE} is not set (tests/support/fetch_vocabularies.py gets the files)")
    return Path(folder) / name


def tiny_byte_level() -> dict[str, object]:
    """Byte n has id n; then 256 he, 257 ll, 258 hell, 259 wor (no merge makes it), and special tokens from 260."""
    tokens = [BYTE_CHARACTERS[byte] for byte in range(256)] + ["he", "ll", "hell", "wor"]
    types = [_NORMAL] * len(tokens)
    tokens += ["<|begin_of_text|>", "<|eot_id|>", "<tool>", "<|fim_pad|>", "<tool>x"]
    types += [_CONTROL, _CONTROL, _USER_DEFINED, _USER_DEFINED, _USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [token.encode() for token in tokens],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [b"h e", b"l l", b"he ll"],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
    }


def tiny_sentencepiece() -> dict[str, object]:
    """0 to 2 special, byte n at 3 + n, then 259 space, a, b, aa, aaa, ab, space + a, and 266 a user-defined one."""
    words = {"\u2581": -9, "a": -9, "b": -9, "aa": -1, "aaa": -2, "ab": -3, "\u2581a": -4, "[x]": 0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * 7, _USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token.encode() for token in tokens],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array([0] * 259 + list(words.values()), np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


_SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0xEFF),
    (0x1780, 0x17FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x0, 0x10FFFF),
)  # fmt: skip
_SPACES = (
    " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\xa0", "\u2028", "\u3000", "\u200b",
)  # fmt: skip
_WORDS = (
    "Hello", "world", "y'all", "I'LL", "don't", "it's", "WE'RE", "'\u017f", "na\u00efve", "\u4f60\u597d", "3.14159",
    "1000000", "\u0967\u0968\u0969", "\u00bd", "def f(x):", "return", "x += 1", "{}[]();", "==", "->", "//", "/* */",
    "<html>", "\\n", "%s", "#include <a.h>", "------", "======", "aaaaaaa", "onono", "blobl", "...", "?!", "\u2026",
)  # fmt: skip
_ODD = (
    "\ufffd", "\x00", "\x7f", "\x1b[0m", "\ufeff", "\u0301", "\u200d", "\ufe0f", "\U0001f468\u200d\U0001f469\u200d",
    "\U0001f1e9\U0001f1ea", "\U0001f44d\U0001f3fd", "\ufdd0", "\uffff", "\U0010ffff", "<0x0A>", "<0xZZ>", "\u2581",
    "\u0120",
    "<|", "|>", "<|eot_id", "</s", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[PAD151646]",
    "<|endoftext|>", "<|begin_of_text|>", "<|reserved_special_token_3|>", "<|start_header_id|>", "<<|im_end|>>",
)  # fmt: skip


def first_difference(first: Encode, second: Encode, texts: Iterable[str]) -> str | None:
    """A text that two encoders see differently, with or without added tokens and texts of control tokens parsed."""
    for text in texts:
        for add_special, parse_special in product((False, True), repeat=2):
            ids = [encode(text, add_special=add_special, parse_special=parse_special) for encode in (first, second)]
            if ids[0] != ids[1]:
                return f"{text!r} {add_special=} {parse_special=}: {ids[0]} and {ids[1]}"
    return None


def encoder_of(tokenizer: Any) -> Encode:
    """A tokenizer of transformers, with llorch's signature."""
    return lambda text, *, add_special, parse_special: tokenizer(
        text, add_special_tokens=add_special, split_special_tokens=not parse_special
    )["input_ids"]


def generated_texts(count: int, *, seed: int) -> list[str]:
    """Different texts of many scripts, code, emoji, white space and things that look invalid, mixed at random."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts["".join(_fragment(rng) for _ in range(rng.randrange(1, 30)))] = None
    return list(texts)


_TEN_SCRIPTS = (
    (0x41, 0x7A), (0xC0, 0x24F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x620, 0x64A), (0x900, 0x97F),
    (0xE01, 0xE3A), (0x3041, 0x30FF), (0x4E00, 0x9FFF),
)  # fmt: skip
_EMOJI = ((0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0xFE00, 0xFE0F), (0x200D, 0x200D), (0x1F1E6, 0x1F1FF))
_CODE = (
    "def ", "f(x):\n", "    return ", "x += 1;", "\t", "{}[]", "!=", "->", "// ", "#include <a.h>\n", "camelCase",
    "snake_case", "HTMLParser", "'it\\'s'", "0xFF", "</div>", "\\n", "a.b()", " == ", "\r\n",
)  # fmt: skip
# A hundred strings are five in each of ten scripts, and as many of the other kinds as this says.
_SHARES = {"code": 10, "numbers": 6, "emoji": 6, "spaces": 6, "tokens": 14, "controls": 8}


def strings_in_shares(count: int, *, seed: int, tokens: Sequence[str], controls: Sequence[str]) -> list[str]:
    """Different strings: ten scripts, code, numbers, emoji, spaces, texts of tokens and of control tokens."""
    rng = random.Random(seed)
    kinds = [*range(len(_TEN_SCRIPTS))] * 5 + [kind for kind, share in _SHARES.items() for _ in range(share)]
    texts: dict[str, None] = {}
    while len(texts) < count:
        kind = kinds[len(texts) % len(kinds)]
        texts["".join(_piece(rng, kind, tokens, controls) for _ in range(rng.randrange(1, 12)))] = None
    return list(texts)


def _piece(rng: random.Random, kind: int | str, tokens: Sequence[str], controls: Sequence[str]) -> str:
    space = rng.choice(("", " "))
    match kind:
        case int():
            return _letters(rng, _TEN_SCRIPTS[kind]) + space
        case "code":
            return rng.choice(_CODE)
        case "numbers":
            return str(rng.randrange(10 ** rng.randrange(1, 12))) + rng.choice((".", ",", " ", "-", "e", "\u0967", "%"))
        case "emoji":
            return _letters(rng, rng.choice(_EMOJI)) + space
        case "spaces":
            return rng.choice(_SPACES) + rng.choice(("", "", "a", "."))
        case "tokens":
            return rng.choice(tokens) + space
        case _:
            return rng.choice(controls) + rng.choice(("", " ", "x"))


def _letters(rng: random.Random, span: tuple[int, int]) -> str:
    return "".join(chr(rng.randint(*span)) for _ in range(rng.randrange(1, 7)))


def _fragment(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        low, high = rng.choice(_SCRIPTS)
        codes = [rng.randint(low, high) for _ in range(rng.randrange(1, 8))]
        return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    return rng.choice((_SPACES, _WORDS, _ODD)[kind - 1])
