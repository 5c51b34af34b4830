"""Constrain answers to a JSON schema with llguidance, which computes the tokens that its grammar allows next.

llguidance gets the model's tokens as bytes; control tokens have no bytes, so that no text contains them. Whitespace
between values is limited as in llama.cpp, so that a model cannot generate blanks for ever.

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
    from llguidance._lib import JsonCompileOptions  # exists only for type checkers

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
MAX_CHARACTERS, MAX_VALUES, MAX_DEPTH = 65536, 2048, 64  # of a schema; 2,000 optional properties compile in 1.2 s
MAX_MULTIPLES = 10_000  # product of all `multipleOf`, the number of states of their automaton
_OPTIONS: "JsonCompileOptions" = {  # every option, because a schema could set a missing one under `x-guidance`
    "item_separator": ",", "key_separator": ":", "whitespace_flexible": True,
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "coerce_one_of": False, "lenient": False,
    "json_allowed_escapes": None, "json_allow_general_unicode_escapes": True,
}  # fmt: skip
_LIMITS = LLParserLimits(max_items_in_row=10_000, max_lexer_states=25_000, verbose_errors=False)  # a state has 2 kB


class JsonGuide:
    """A `llorch.model.generate.Guide` that constrains one answer to a grammar."""

    def __init__(self, matcher: LLMatcher, ends: np.ndarray, n_tokens: int) -> None:
        """Start before the first token; `ends` masks the end tokens, llguidance knows the first `n_tokens` ids."""
        self._matcher, self._ends, self._n_tokens = matcher, ends, n_tokens
        self._ended = False  # True after an end token

    def allowed(self) -> np.ndarray:
        """See `Guide.allowed`; end tokens only after a complete value; FormatError if a step exceeds `_LIMITS`."""
        if self._ended:
            return self._ends.copy()
        bits = allocate_token_bitmask(1, self._n_tokens + 1)  # + 1: the end token of `_Vocabulary`
        fill_next_token_bitmask(self._matcher, bits)
        if self._matcher.is_error():
            raise _unsupported_error(self._matcher)
        mask = np.zeros_like(self._ends)
        mask[: self._n_tokens] = np.unpackbits(bits.view(np.uint8)[0], count=self._n_tokens, bitorder="little")
        mask[self._ends] = self._matcher.is_accepting()
        return mask

    def take(self, token_id: int) -> None:
        """Advance by one token, see `Guide.take`; raise FormatError for a token that was not allowed."""
        self._ended = self._ended or bool(self._ends[token_id])
        if not self._ended and not self._matcher.consume_token(token_id):
            raise _unsupported_error(self._matcher)


def guide_for(
    tokenizer: Tokenizer, schema: Mapping[str, object] | None, *, vocab_size: int, end_ids: frozenset[int] | None = None
) -> JsonGuide:
    """Make a guide that constrains one answer to a JSON schema, from the first token on.

    Args:
        tokenizer: Tokenizer of the model; its converted vocabulary is cached for the next call.
        schema: The schema; None for any JSON object.
        vocab_size: Number of logits of the model, which may be more than the tokenizer has tokens.
        end_ids: Tokens that end the answer; the tokenizer's EOS tokens by default.

    Raises:
        FormatError: Unsupported: the schema is invalid, matches no value, or uses features that llguidance lacks, such
            as `oneOf`, `not` and `uniqueItems`; TooLarge: over 65,536 characters, 2,048 values or a depth of 64.
        UserError: There is no end token.
    """
    ends = np.zeros(vocab_size, bool)
    ends[sorted(tokenizer.eos_token_ids if end_ids is None else end_ids)] = True
    if not ends.any():
        raise UserError("json schema: expected a model with an end token, got one without; leave ignore_eos off")
    grammar_tokenizer = _grammar_tokenizer(tokenizer, min(vocab_size, tokenizer.vocab_size))
    matcher = LLMatcher(grammar_tokenizer, _compile_grammar(schema), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise _unsupported_error(matcher, schema)
    guide = JsonGuide(matcher, ends, min(vocab_size, tokenizer.vocab_size))
    try:
        guide.allowed()  # some schemas that match no value fail only here
    except FormatError:
        raise _unsupported_error(matcher, schema) from None
    return guide


def _compile_grammar(schema: Mapping[str, object] | None) -> str:
    checked_schema = ANY_OBJECT if schema is None else schema
    _require_bounded(checked_schema)
    try:
        text = json.dumps(checked_schema, allow_nan=False)
    except ValueError:
        raise FormatError("Malformed", "json schema: expected finite numbers, got NaN or infinity") from None
    if len(text) > MAX_CHARACTERS:
        raise FormatError("TooLarge", f"json schema: expected at most {MAX_CHARACTERS} characters, got {len(text)}")
    return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)


def _require_bounded(schema: Mapping[str, object]) -> None:
    """Raise FormatError for a schema with too many values, too deep or with large multiples, before llguidance runs."""
    multiples = set()
    for index, (value, depth) in enumerate(_nested_values(schema)):
        if index == MAX_VALUES:
            raise FormatError("TooLarge", f"json schema: expected at most {MAX_VALUES} values, got more")
        if depth > MAX_DEPTH:
            raise FormatError("TooLarge", f"json schema: expected a depth of at most {MAX_DEPTH}, got more")
        if isinstance(value, Mapping) and isinstance(value.get("multipleOf"), int | float):
            multiples.add(_n_states(value["multipleOf"]))
    if prod(multiples) > MAX_MULTIPLES:
        expected = f"multipleOf values with a product of at most {MAX_MULTIPLES} (without decimal points)"
        raise FormatError("TooLarge", f"json schema: expected {expected}, got {prod(multiples)}")


def _nested_values(schema: object) -> Iterator[tuple[object, int]]:
    """Yield every value nested in a schema, with its depth."""
    pending = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        pending += [(child, depth + 1) for child in children]


def _n_states(multiple: float) -> int:
    """Count the states of the automaton for a multiple: the remainders of the integer without its decimal point."""
    if not np.isfinite(multiple):
        return MAX_MULTIPLES + 1
    exact = Decimal(str(multiple))
    return int(abs(exact).scaleb(max(0, -int(exact.as_tuple().exponent))))


@lru_cache(maxsize=2)
def _grammar_tokenizer(tokenizer: Tokenizer, n_tokens: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, n_tokens)), slices=LLTokenizer.json_slices())


class _Vocabulary:
    """llorch's tokenizer with the interface that llguidance requires."""

    def __init__(self, tokenizer: Tokenizer, n_tokens: int) -> None:
        self.tokens = [*(tokenizer.token_bytes(token_id) for token_id in range(n_tokens)), b"<end>"]
        self.eos_token_id = n_tokens  # no token of the model: `JsonGuide` handles the model's end tokens
        self.special_token_ids = [n_tokens]  # control tokens have no bytes, so they are never allowed
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens[:-1]) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize forced text with the model's tokenizer; if it adds a space or normalises, encode greedily."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special=False)
        is_exact = all(i < len(self.tokens) - 1 for i in ids) and b"".join(self.tokens[i] for i in ids) == text
        return ids if is_exact else self._encode_greedily(text)

    def _encode_greedily(self, text: bytes) -> list[int]:
        """Encode text greedily by the longest token; stop early at bytes that start no token."""
        ids, position = [], 0
        while position < len(text):
            prefixes = (text[position : position + length] for length in range(self._longest, 0, -1))
            prefix = next((prefix for prefix in prefixes if prefix in self._ids), None)
            if prefix is None:
                return ids  # the model generates the remaining bytes itself
            ids.append(self._ids[prefix])
            position += len(prefix)
        return ids


def _unsupported_error(matcher: LLMatcher, schema: Mapping[str, object] | None = None) -> FormatError:
    reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]
    if schema is not None and (cycle := _find_cycle(schema)):
        reason = f"expected a $ref that ends at a type, got the cycle {' -> '.join(cycle)}"
    return FormatError(
        "Unsupported", f"json schema: {reason or f'no value can match this schema ({matcher.stop_reason()})'}"
    )


def _find_cycle(schema: Mapping[str, object]) -> list[str]:
    """Find a cycle of `$ref` pointers with only anyOf, allOf and oneOf between them; empty if there is none."""
    pending = [(first_pointer, [first_pointer]) for first_pointer in _references(schema)]
    while pending:
        pointer, path = pending.pop()
        for next_pointer in _references(_resolve_pointer(schema, pointer)):
            if next_pointer in path:
                return [*path[path.index(next_pointer) :], next_pointer]
            pending.append((next_pointer, [*path, next_pointer]))
    return []


def _references(schema: object) -> list[str]:
    """List the pointers that must be followed to find the type of a schema."""
    if not isinstance(schema, Mapping):
        return []
    parts = [
        part for key in ("anyOf", "allOf", "oneOf") if isinstance(schemas := schema.get(key), list) for part in schemas
    ]
    direct = [pointer] if isinstance(pointer := schema.get("$ref"), str) else []
    return direct + [pointer for part in parts for pointer in _references(part)]


def _resolve_pointer(schema: object, pointer: str) -> object:
    """Return the value at a JSON pointer such as `#/$defs/a` in a schema; None if there is none."""
    for name in pointer.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if pointer.startswith("#") else None
