"""Keeps the text of control tokens plain text where a user wrote it, through a chat template.

A template puts the words of users and its own control tokens into one text, in which `<|im_end|>` is the same whoever
wrote it. So such texts are broken in the conversation by a character that is no text (U+FDD0 and on are reserved for
the use inside of programs), and after rendering that character is taken out again and its place is kept: no control
token may run over it. One of a single character has no inside: there the character stands behind it, twice.

Source: transformers 5.23 `sanitize_control_tokens` (the same idea); Unicode 16, section 23.7 (noncharacters).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_NAMES = ("role", "type")  # values that a template compares, not what somebody wrote


class Breaker:
    """Breaks the texts of control tokens."""

    def __init__(self, controls: Collection[str]) -> None:
        """Prepare the search for the texts of control tokens."""
        texts = sorted((text for text in controls if text), key=len, reverse=True)
        self._whole = _any_of([text for text in texts if len(text) > 1])
        self._single = _any_of([text for text in texts if len(text) == 1])
        self._starts = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def mark_for(self, values: object) -> str | None:
        """A character that does not occur in a conversation; None when there is nothing to break."""
        texts = list(_texts(values))
        if not any(self.found_in(text) for text in texts):
            return None
        return next((mark for mark in _MARKS if not any(mark in text for text in texts)), _MARKS[0])

    def found_in(self, text: str) -> bool:
        """Whether a text holds that of a control token, or ends with the beginning of one."""
        return bool(self._whole.search(text) or self._single.search(text)) or self._end(text) < len(text)

    def broken(self, values: object, mark: str) -> object:
        """A copy with `mark` after the first character of each control token's text, twice if that is all of it."""
        return _mapped(values, lambda text: self._break(text, mark))

    def _break(self, text: str, mark: str) -> str:
        end = self._end(text)
        head, tail = text[:end], text[end:]
        tail = tail and tail[0] + mark + tail[1:]
        broken = self._whole.sub(lambda match: match[0][0] + mark + match[0][1:], head) + tail
        return self._single.sub(lambda match: match[0] + 2 * mark, broken)

    def _end(self, text: str) -> int:
        """Where the beginning of a control token's text starts that ends this text: the template may add the rest."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._starts:
                return start
        return len(text)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def taken_out(text: str, mark: str | None) -> tuple[str, list[int]]:
    """A rendered text without its marks, and the places where they were."""
    if mark is None:
        return text, []
    parts = re.split(f"{mark}|\\\\u{ord(mark):04x}", text)  # a template may write non-ASCII characters as escapes
    places, place = [], 0
    for part in parts[:-1]:
        place += len(part)
        places.append(place)
    return "".join(parts), places


def _texts(values: object) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            if key not in _NAMES:
                yield from _texts(key)
                yield from _texts(value)
    elif isinstance(values, Sequence):
        for value in values:
            yield from _texts(value)


def _mapped(values: object, change: Callable[[str], str]) -> object:
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        return {
            key if key in _NAMES else change(key): value if key in _NAMES else _mapped(value, change)
            for key, value in values.items()
        }
    if isinstance(values, Sequence):
        return [_mapped(value, change) for value in values]
    return values
