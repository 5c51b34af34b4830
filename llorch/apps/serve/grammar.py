"""Answers in the form of a JSON schema: llguidance walks its grammar byte by byte, and says which tokens may come next.

It is told our tokens as bytes, control tokens as none that text can have. What a schema leaves open, whitespace between
values, is bounded as llama.cpp bounds it, so that a model cannot go on with blanks for ever.

Source: llguidance docs/json_schema.md; llama.cpp common/json-schema-to-grammar.cpp, SPACE_RULE (whitespace).
"""

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from llorch.files.tokenizer import Tokenizer
from llorch.runtime.errors import FormatError, UserError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # not there when it runs

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
MAX_CHARACTERS, MAX_VALUES, MAX_DEPTH = 65536, 2048, 64  # of a schema; 2,000 optional properties compile in 1.2 s
MAX_MULTIPLES = 10_000  # product of all `multipleOf`: so many states has their automaton
_OPTIONS: "JsonCompileOptions" = {  # all of them: a schema may set others under `x-guidance`
    "item_separator": ",", "key_separator": ":", "whitespace_flexible": True,
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "coerce_one_of": False, "lenient": False,
    "json_allowed_escapes": None, "json_allow_general_unicode_escapes": True,
}  # fmt: skip
_LIMITS = LLParserLimits(max_items_in_row=10_000, max_lexer_states=25_000, verbose_errors=False)  # 2 kB a state


class JsonGuide:
    """A `llorch.model.generate.Guide` for one answer."""

    def __init__(self, matcher: LLMatcher, ends: np.ndarray, n_tokens: int) -> None:
        """Start before the first token; of the ids only the first `n_tokens` are the library's."""
        self._matcher, self._ends, self._n_tokens = matcher, ends, n_tokens
        self._ended = False

    def allowed(self) -> np.ndarray:
        """See `Guide.allowed`; end tokens exactly where the form is complete. FormatError: a step costs too much."""
        if self._ended:
            return self._ends.copy()
        bits = allocate_token_bitmask(1, self._n_tokens + 1)
        fill_next_token_bitmask(self._matcher, bits)
        if self._matcher.is_error():
            raise _unsupported(self._matcher)
        mask = np.zeros_like(self._ends)
        mask[: self._n_tokens] = np.unpackbits(bits.view(np.uint8)[0], count=self._n_tokens, bitorder="little")
        mask[self._ends] = self._matcher.is_accepting()
        return mask

    def take(self, token_id: int) -> None:
        """Go on, see `Guide.take`; FormatError for a token that was not allowed."""
        self._ended = self._ended or bool(self._ends[token_id])
        if not self._ended and not self._matcher.consume_token(token_id):
            raise _unsupported(self._matcher)


def guide_for(
    tokenizer: Tokenizer, schema: Mapping[str, object] | None, *, vocab_size: int, end_ids: frozenset[int] | None = None
) -> JsonGuide:
    """Hold one answer to a JSON schema: return a guide before the first token.

    Args:
        tokenizer: Whose tokens the answer has; what is made of it is kept for the next call.
        schema: The schema; None for any JSON object.
        vocab_size: Logits of the model, which may have more rows than the tokenizer has tokens.
        end_ids: Tokens that end the answer; by default those of the tokenizer.

    Raises:
        FormatError: Unsupported: the schema is none, cannot be fulfilled, or uses what the library lacks, such as
            `oneOf`, `not` and `uniqueItems`; TooLarge: it is beyond 65,536 characters, 2,048 values or a depth of 64.
        ValueError: There is no end token.
    """
    ends = np.zeros(vocab_size, bool)
    ends[sorted(tokenizer.eos_token_ids if end_ids is None else end_ids)] = True
    if not ends.any():
        raise UserError("json schema: expected a model with an end token, got one without; leave ignore_eos off")
    words = _grammar_tokenizer(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = LLMatcher(words, _grammar(schema), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise _unsupported(matcher, schema)
    guide = JsonGuide(matcher, ends, min(vocab_size, tokenizer.vocab_size))
    try:
        guide.allowed()  # some schemas that nothing fulfils show here
    except FormatError:
        raise _unsupported(matcher, schema) from None
    return guide


def _grammar(schema: Mapping[str, object] | None) -> str:
    checked = ANY_OBJECT if schema is None else schema
    _require_bounded(checked)
    try:
        text = json.dumps(checked, allow_nan=False)
    except ValueError:
        raise FormatError("Malformed", "json schema: expected finite numbers, got NaN or infinity") from None
    if len(text) > MAX_CHARACTERS:
        raise FormatError("TooLarge", f"json schema: expected at most {MAX_CHARACTERS} characters, got {len(text)}")
    return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)


def _require_bounded(schema: Mapping[str, object]) -> None:
    """Refuse what costs too much before the library sees it."""
    multiples = set()
    for n, (value, depth) in enumerate(_nested_values(schema)):
        if n == MAX_VALUES:
            raise FormatError("TooLarge", f"json schema: expected at most {MAX_VALUES} values, got more")
        if depth > MAX_DEPTH:
            raise FormatError("TooLarge", f"json schema: expected a depth of at most {MAX_DEPTH}, got more")
        if isinstance(value, Mapping) and isinstance(value.get("multipleOf"), int | float):
            multiples.add(_states(value["multipleOf"]))
    if prod(multiples) > MAX_MULTIPLES:
        wanted = f"multipleOf values with a product of at most {MAX_MULTIPLES} (without decimal points)"
        raise FormatError("TooLarge", f"json schema: expected {wanted}, got {prod(multiples)}")


def _nested_values(schema: object) -> Iterator[tuple[object, int]]:
    """Yield every value of a schema, and how deep it lies."""
    pending = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        pending += [(one, depth + 1) for one in inner]


def _states(multiple: float) -> int:
    """Turn a number into an integer by removing its point; its remainders are the states of an automaton."""
    if not np.isfinite(multiple):
        return MAX_MULTIPLES + 1
    exact = Decimal(str(multiple))
    return int(abs(exact).scaleb(max(0, -int(exact.as_tuple().exponent))))


@lru_cache(maxsize=2)
def _grammar_tokenizer(tokenizer: Tokenizer, n_tokens: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, n_tokens)), slices=LLTokenizer.json_slices())


class _Vocabulary:
    """Our tokenizer as the library wants to see one."""

    def __init__(self, tokenizer: Tokenizer, n_tokens: int) -> None:
        self.tokens = [*(tokenizer.token_bytes(one) for one in range(n_tokens)), b"<end>"]
        self.eos_token_id = n_tokens  # no token of the model: callers say which tokens end an answer
        self.special_token_ids = [n_tokens]  # control tokens have no bytes, and never come
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._ids = {text: one for one, text in enumerate(self.tokens[:-1]) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize forced text by the model's tokenizer; if its tokens have other bytes, take the longest tokens."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special=False)
        same = all(one < len(self.tokens) - 1 for one in ids) and b"".join(self.tokens[one] for one in ids) == text
        return ids if same else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Encode text by the longest tokens first; for vocabularies whose own encoding adds a space or normalises."""
        ids, at = [], 0
        while at < len(text):
            parts = (text[at : at + n] for n in range(self._longest, 0, -1))
            part = next((part for part in parts if part in self._ids), None)
            if part is None:
                return ids  # what is left must come byte by byte
            ids.append(self._ids[part])
            at += len(part)
        return ids


def _unsupported(matcher: LLMatcher, schema: Mapping[str, object] | None = None) -> FormatError:
    said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]
    if schema is not None and (cycle := _cycle(schema)):
        said = f"expected a $ref that ends at a type, got the cycle {' -> '.join(cycle)}"
    return FormatError(
        "Unsupported", f"json schema: {said or f'no value can match this schema ({matcher.stop_reason()})'}"
    )


def _cycle(schema: Mapping[str, object]) -> list[str]:
    """Find pointers of `$ref` that lead to each other, with nothing but anyOf, allOf and oneOf between them."""
    pending = [(one, [one]) for one in _references(schema)]
    while pending:
        pointer, way = pending.pop()
        for following in _references(_resolve_pointer(schema, pointer)):
            if following in way:
                return [*way[way.index(following) :], following]
            pending.append((following, [*way, following]))
    return []


def _references(schema: object) -> list[str]:
    """List the pointers that a value must follow before it has a type."""
    if not isinstance(schema, Mapping):
        return []
    parts = [
        one for key in ("anyOf", "allOf", "oneOf") if isinstance(listed := schema.get(key), list) for one in listed
    ]
    own = [pointer] if isinstance(pointer := schema.get("$ref"), str) else []
    return own + [pointer for part in parts for pointer in _references(part)]


def _resolve_pointer(schema: object, pointer: str) -> object:
    """Return the value that a JSON pointer such as `#/$defs/a` names in a schema; None where there is none."""
    for name in pointer.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if pointer.startswith("#") else None
