"""Parallel lists of a GGUF vocabulary: texts, types, scores and merges, with consistency checks."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np

from llorch.files.tokenizer.merges import check_merges
from llorch.files.tokenizer.sentencepiece import BYTE_TOKEN
from llorch.runtime.errors import ErrorCode, FormatError

_LONGEST_TOKEN = 1024  # characters; Llama 3 and Qwen have up to 128; the cost of a merge grows with it


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenTable:
    """Texts and types by token id."""

    def __init__(self, metadata: Mapping[str, object], path: str | Path) -> None:
        """Read and check the token list and its types."""
        self._metadata = metadata
        self._path = path
        self.texts = self._read_texts()
        self.types = self._read_types()

    def ids_of(self, *types: TokenType) -> dict[str, int]:
        """Map the texts of tokens of some types to their ids, in the order of ids."""
        return {text: i for i, (text, kind) in enumerate(zip(self.texts, self.types, strict=True)) if kind in types}

    def read_scores(self) -> list[float]:
        """Return one finite score per token; higher scores merge first. All are equal in a file without scores."""
        if "tokenizer.ggml.scores" not in self._metadata:
            return [0.0] * len(self.texts)
        scores = self._numbers("scores", kinds="fi")
        if not np.isfinite(scores).all():
            first = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise self._error("NonFinite", "scores", f"finite numbers, got {scores[first]} for token {first}")
        return scores.tolist()

    def read_merges(self, ids: Mapping[str, int]) -> list[tuple[str, str]]:
        """Read the merges as pairs of token texts, sorted by priority; see `check_merges`."""
        return check_merges(self._strings("merges"), ids, key="tokenizer.ggml.merges", path=self._path)

    def _read_texts(self) -> list[str]:
        """Read the token texts, which must be different; bytes that are no UTF-8 become surrogates."""
        texts = [raw.decode("utf-8", "surrogateescape") for raw in self._strings("tokens")]
        if not texts:
            raise self._error("Missing", "tokens", "at least one token")
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        if len(texts[longest]) > _LONGEST_TOKEN:
            actual = f"got {len(texts[longest])} in token {longest}"
            raise self._error("TooLarge", "tokens", f"at most {_LONGEST_TOKEN} characters in a token, {actual}")
        # llama.cpp's replacement; an empty text would match everywhere.
        texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)]
        if len(set(texts)) < len(texts):
            first_ids = {text: token_id for token_id, text in reversed([*enumerate(texts)])}
            repeated_id = next(i for i, text in enumerate(texts) if first_ids[text] != i)
            duplicate = f"{texts[repeated_id]!r} as token {first_ids[texts[repeated_id]]} and as token {repeated_id}"
            raise self._error("Duplicate", "tokens", f"different texts, got {duplicate}")
        return texts

    def _read_types(self) -> list[TokenType]:
        if "tokenizer.ggml.token_type" not in self._metadata:
            return [TokenType.NORMAL] * len(self.texts)
        numbers = self._numbers("token_type", kinds="i")
        invalid = np.flatnonzero((numbers < 0) | (numbers > max(TokenType)))
        if invalid.size:
            actual = f"got {numbers[invalid[0]]} for token {invalid[0]}"
            raise self._error("OutOfRange", "token_type", f"0 to {max(TokenType)}, {actual}")
        token_types = list(TokenType)
        types = [token_types[number] for number in numbers.tolist()]
        for token_id, (text, kind) in enumerate(zip(self.texts, types, strict=True)):
            if kind is TokenType.BYTE and not BYTE_TOKEN.fullmatch(text):
                message = f"<0x00> to <0xFF> as byte tokens, got {text!r} as token {token_id}"
                raise self._error("Malformed", "tokens", message)
        return types

    def _strings(self, key: str) -> Sequence[bytes]:
        value = self._get(key)
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self._error("Inconsistent", key, f"a list of strings, got {type(value).__name__}")
        return value

    def _numbers(self, key: str, *, kinds: str) -> np.ndarray:
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.dtype.itemsize != 4:
            actual = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            expected = "32-bit integers" if kinds == "i" else "32-bit numbers"
            raise self._error("Inconsistent", key, f"a list of {expected}, got {actual}")
        if len(value) != len(self.texts):
            raise self._error("Inconsistent", key, f"one entry per token ({len(self.texts)}), got {len(value)}")
        return value

    def _get(self, key: str) -> object:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            raise self._error("Missing", key, "a list, got nothing")
        return value

    def _error(self, code: ErrorCode, key: str, expected: str) -> FormatError:
        return FormatError(code, f"tokenizer.ggml.{key}: expected {expected}", path=self._path)
