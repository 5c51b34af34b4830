"""Conversations as a model reads them: a chat template writes them, and what users wrote stays plain text in them.

A template puts the words of users and its own control tokens into one text, in which `<|im_end|>` is the same whoever
wrote it. So such texts are broken in the conversation by a character that is no text (U+FDD0 and on are reserved for
the use inside of programs), and after rendering that character is taken out again and its place is kept: no control
token may run over it. One of a single character has no inside: there the character stands behind it, twice.

llorch and llama.cpp know the end of a turn by its text, such as `<|im_end|>`. transformers knows only the ids that
`generation_config.json` names, or where that file is absent those of `config.json`.

Source: transformers 5.23 `sanitize_control_tokens` (the same idea), generation/configuration_utils.py
(`from_model_config`) and generation/utils.py (`_prepare_special_tokens`); Unicode 16, section 23.7 (noncharacters).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llorch.files.strict_json import read_settings
from llorch.files.tokenizer.chat import ChatTemplate, Message, TemplateSettings, compiled, read_templates
from llorch.files.tokenizer.messages import (
    CALLS,
    Texts,
    checked_messages,
    further_keys,
    refuse_media,
    unwritten_call,
    unwritten_message_keys,
)
from llorch.files.tokenizer.tokenizer import Tokenizer
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

MOST_KEYS = 16  # of the messages of a request, beside role and content
_PROBE = "Yes."
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
        """Choose a character that does not occur in a conversation; None when there is nothing to break."""
        texts = list(_texts(values))
        if not any(self.found_in(text) for text in texts):
            return None
        return next((mark for mark in _MARKS if not any(mark in text for text in texts)), _MARKS[0])

    def found_in(self, text: str) -> bool:
        """Tell if a text holds that of a control token, or ends with the beginning of one."""
        return bool(self._whole.search(text) or self._single.search(text)) or self._end(text) < len(text)

    def broken(self, values: object, mark: str) -> object:
        """Copy values with `mark` after the first character of each control token; twice if that is all."""
        return _mapped(values, lambda text: self._break(text, mark))

    def _break(self, text: str, mark: str) -> str:
        """Put the mark inside each text of a control token, and into an end that may become one."""
        end = self._end(text)
        head, tail = text[:end], text[end:]
        tail = tail and tail[0] + mark + tail[1:]
        broken = self._whole.sub(lambda match: match[0][0] + mark + match[0][1:], head) + tail
        return self._single.sub(lambda match: match[0] + 2 * mark, broken)

    def _end(self, text: str) -> int:
        """Find where a text ends if its last characters may begin a control token that the template completes."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._starts:
                return start
        return len(text)


class Conversation:
    """Renders the beginnings of one conversation."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        template: ChatTemplate,
        breaker: Breaker,
        settings: TemplateSettings,
    ) -> None:
        """Break control tokens in the words of users."""
        given = {"messages": messages, "tools": tools, "variables": settings.variables}
        self._mark = breaker.mark_for(given)
        broken = given if self._mark is None else breaker.broken(given, self._mark)
        assert isinstance(broken, dict)
        self._messages, self._tools = broken["messages"], broken["tools"]
        self._settings = replace(settings, variables=broken["variables"])
        self._template = template

    def text(self, count: int, *, opened: bool = False) -> tuple[str, list[int]]:
        """Render the first messages, and an assistant's opening if `opened`; return text and inert places."""
        text = self._template.render(
            self._messages[:count], tools=self._tools, add_generation_prompt=opened, settings=self._settings
        )
        return taken_out(text, self._mark)


@dataclass(frozen=True)
class Written:
    """A conversation as one text."""

    text: str
    inert: Sequence[int] | None  # places over which no control token runs; None: it has none at all


class Chats:
    """How one model writes conversations."""

    def __init__(self, templates: Callable[[], Mapping[str, str]], tokenizer: Tokenizer, *, path: str | Path) -> None:
        """Prepare; templates are read and checked when the first conversation comes."""
        self._read, self._tokenizer, self._path = templates, tokenizer, path
        self.breaker = Breaker(tokenizer.control_texts)  # knows the texts of control tokens
        self.settings = TemplateSettings()  # of every conversation that brings no settings

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None = None,
        settings: TemplateSettings | None = None,
    ) -> Conversation:
        """Take up a conversation; FormatError where the model has no chat template, or one that is none."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise _no_template(self._templates, self._path)
        return Conversation(messages, tools, self._templates[name], self.breaker, settings or self.settings)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation up to the wanted answer as token ids; the content of the messages stays text."""
        return self.encoded(self.written(messages))

    def written(self, messages: Sequence[Message]) -> Written:
        """Write a conversation up to the answer that is wanted; FormatError where there is no chat template."""
        return self._written(messages, self.settings, opened=True)

    @property
    def has_template(self) -> bool:
        """True if there is a template, valid or not."""
        return bool(self._read())

    def template_mentions(self, text: str) -> bool:
        """Tell if the source of a template holds a text, such as the name of a variable."""
        return any(text in source for source in self._read().values())

    def spoken(
        self, messages: Sequence[Message], *, opened: bool = True, variables: Mapping[str, object] | None = None
    ) -> Written:
        """Write a conversation of a chat, up to the answer if `opened`.

        For a model without a template, write the words alone, with a blank line between two messages. `variables` of
        the template go before those of the settings. FormatError where a template cannot take the messages.
        """
        if not self.has_template:
            for place, message in enumerate(messages):
                refuse_media(Fields({}, self._path), f"messages[{place}]", message)
            _refuse_unwritten(messages, lambda given, _: [_joined_words(given)], path=self._path)
            return Written(_joined_words(messages), None)
        checked = checked_messages(Fields({}, self._path), "messages", list(messages))
        return self._written(checked, self._settings_with(variables), opened=opened)

    def unwritten(
        self, messages: Sequence[Message], *, variables: Mapping[str, object] | None = None
    ) -> list[tuple[int, str]]:
        """Find the keys of messages that `spoken` leaves out, each with the place of its first message.

        The template runs once or twice, then once for each of at most `MOST_KEYS` keys; FormatError for more keys.
        """
        n_keys = len(further_keys(messages))
        if not n_keys:
            return []
        if n_keys > MOST_KEYS:
            expected = f"at most {MOST_KEYS} keys beside role and content"
            raise Fields({}, self._path).error("OutOfRange", "messages", expected, n_keys)
        settings = self._settings_with(variables)

        def texts(given: Sequence[Message], tools: Sequence[object] | None) -> Iterator[str]:
            if not self.has_template:
                yield _joined_words(given)
                return
            checked = checked_messages(Fields({}, self._path), "messages", list(given))
            yield self.conversation(checked, tools, settings).text(len(checked), opened=True)[0]

        found = unwritten_message_keys(messages, None, texts, [*texts(messages, None)])
        first = {(str(m["role"]), key): place for place, m in reversed([*enumerate(messages)]) for key in m}
        return [(first[role, key], key) for role, key in found]

    def _settings_with(self, variables: Mapping[str, object] | None) -> TemplateSettings:
        return replace(self.settings, variables={**(self.settings.variables or {}), **(variables or {})})

    def _written(self, messages: Sequence[Message], settings: TemplateSettings, *, opened: bool) -> Written:
        """Render a conversation; Unsupported where the template leaves tool calls out."""

        def texts(given: Sequence[Message], tools: Sequence[object] | None) -> Iterator[str]:
            yield self.conversation(given, tools, settings).text(len(given), opened=opened)[0]

        written = Written(*self.conversation(messages, settings=settings).text(len(messages), opened=opened))
        _refuse_unwritten(messages, texts, path=self._path)
        return written

    def encoded(self, written: Written) -> list[int]:
        """Encode a written conversation as token ids."""
        if written.inert is None:
            return self._tokenizer.encode(written.text)
        return self._tokenizer.encode_rendered(written.text, inert=written.inert)[0]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The control token that the template writes behind the words of the assistant, whatever files say of it."""
        if not self.has_template:
            return frozenset()
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        text, _ = self.conversation(asked).text(2)
        ids, starts = self._tokenizer.encode_rendered(text)
        said = text.rfind(_PROBE)
        behind = [one for one, start in zip(ids, starts, strict=True) if start > said]
        return frozenset([one for one in behind if one in self._tokenizer.control_ids][:1])

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return compiled(self._read(), self._tokenizer, path=self._path)


def _no_template(names: Collection[str], path: str | Path) -> FormatError:
    """Make the error for a conversation that needs the default template; the model may have others, by `names`."""
    if names:
        message = f"expected a default chat template, got only templates with names ({', '.join(sorted(names))})"
        remedy = "write one of them to chat_template.jinja in the Hugging Face folder, which makes it the default"
    else:
        message = "expected a chat template for a conversation, the model has none"
        remedy = "add chat_template.jinja to the Hugging Face folder, or use plain text"
        remedy += " (a prompt, or rows of prompt and completion)"
    return FormatError("Missing", f"{message}; {remedy}", path=path)


def _joined_words(messages: Sequence[Message]) -> str:
    """Join the words of messages, for a model without a template."""
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def _refuse_unwritten(messages: Sequence[Message], texts: Texts, *, path: str | Path) -> None:
    """Refuse tool calls that the model would not see."""
    if any(message.get(key) for message in messages for key in CALLS):
        call = unwritten_call(messages, None, texts, [*texts(messages, None)])
        if call is not None:
            message = "expected a chat template that writes tool calls, the model's chat template omits them"
            raise FormatError("Unsupported", f"messages{call}: {message}; write the calls into the content", path=path)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def taken_out(text: str, mark: str | None) -> tuple[str, list[int]]:
    """Remove the marks from a rendered text; return the text and the places where the marks were."""
    if mark is None:
        return text, []
    parts = re.split(f"{mark}|\\\\u{ord(mark):04x}", text)  # a template may write non-ASCII characters as escapes
    places, place = [], 0
    for part in parts[:-1]:
        place += len(part)
        places.append(place)
    return "".join(parts), places


def _texts(values: object) -> Iterator[str]:
    """Yield every text in nested values, keys too, but for values that templates compare."""
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
    """Copy nested values with every text changed, but for values that templates compare."""
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


GENERATION = "generation_config.json"


def unnamed_ends(written: Collection[int], folder: str | Path) -> list[int]:
    """Sort out the ids at which transformers would not stop; a GGUF file has none, its readers know ends by text."""
    return sorted({*written} - {*_ends_of_config(Path(folder))}) if Path(folder).is_dir() else []


def chat_ends(folder: Path) -> frozenset[int]:
    """Find what the chat template of a folder ends a turn with; nothing where there is no template that can be read."""
    try:
        tokenizer = Tokenizer.from_huggingface(folder)
        return Chats(lambda: read_templates(folder), tokenizer, path=folder).end_ids
    except (FormatError, FileNotFoundError):
        return frozenset()


def with_ends(folder: Path, more: Collection[int]) -> dict[str, object]:
    """Make the values of a `generation_config.json` that ends at more ids than that of a folder."""
    values = _text_settings(folder)
    if not (folder / GENERATION).exists():
        values = {key: values[key] for key in ("bos_token_id", "pad_token_id") if values.get(key) is not None}
    return {**values, "eos_token_id": [*_ends_of_config(folder), *more]}


def _ends_of_config(folder: Path) -> list[int]:
    """Read the end tokens that the config.json of a folder names."""
    value = _text_settings(folder).get("eos_token_id")
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]


def _text_settings(folder: Path) -> Mapping[str, object]:
    """Return the folder's generation settings, else its configuration with the text part's keys."""
    if (folder / GENERATION).exists():
        return read_settings(folder / GENERATION)
    values = read_settings(folder / "config.json")
    text = values.get("text_config")
    return {**text, **values} if isinstance(text, dict) else values
