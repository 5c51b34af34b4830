"""Rendering of conversations by a chat template, with user text that cannot become control tokens.

A template writes user text and control tokens into one text, in which `<|im_end|>` of a user equals the template's. So
control token texts in the conversation are split by a noncharacter as a mark (U+FDD0 and following, reserved for use
inside programs). After rendering the marks are removed and their positions are stored: no control token may span one.
After a control token text of a single character the mark stands twice.

llorch and llama.cpp recognise the end of a turn by its text, such as `<|im_end|>`. transformers uses only the ids of
`generation_config.json`, or of `config.json` if that file is missing.

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
    unrendered_call,
    unrendered_message_keys,
)
from llorch.files.tokenizer.tokenizer import Tokenizer
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

MOST_KEYS = 16  # per request, without role and content
_PROBE = "Yes."  # answer of a test conversation, to find the end-of-turn token
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # noncharacters
_NAMES = ("role", "type")  # keys whose values a template compares; not user text


class Splitter:
    """Splitter of control token texts by marks: with a mark inside, a text is no control token."""

    def __init__(self, controls: Collection[str]) -> None:
        """Prepare the search for the texts of control tokens."""
        texts = sorted((text for text in controls if text), key=len, reverse=True)
        self._whole = _match_any([text for text in texts if len(text) > 1])
        self._single = _match_any([text for text in texts if len(text) == 1])
        self._starts = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def mark_for(self, values: object) -> str | None:
        """Return a mark that does not occur in a conversation; None if there is no control token text."""
        texts = list(_texts(values))
        if not any(self.found_in(text) for text in texts):
            return None
        # If the texts have all 32 marks, the first one: then characters of the user that equal it are lost.
        return next((mark for mark in _MARKS if not any(mark in text for text in texts)), _MARKS[0])

    def found_in(self, text: str) -> bool:
        """Check if a text contains a control token text, or ends with a prefix of one."""
        return bool(self._whole.search(text) or self._single.search(text)) or self._partial_start(text) < len(text)

    def insert_marks(self, conversation: object, mark: str) -> object:
        """Copy values with `mark` after the first character of each control token text; twice if it has only one."""
        return _map_texts(conversation, lambda text: self._insert_mark(text, mark))

    def _insert_mark(self, text: str, mark: str) -> str:
        """Insert the mark into each control token text, and into an end that may become one."""
        start = self._partial_start(text)
        head, tail = text[:start], text[start:]
        tail = tail and tail[0] + mark + tail[1:]
        marked = self._whole.sub(lambda match: match[0][0] + mark + match[0][1:], head) + tail
        return self._single.sub(lambda match: match[0] + 2 * mark, marked)

    def _partial_start(self, text: str) -> int:
        """Return the start of a suffix that the template may complete to a control token; else `len(text)`."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._starts:
                return start
        return len(text)


class Conversation:
    """Conversation whose prefixes can be rendered."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        template: ChatTemplate,
        splitter: Splitter,
        settings: TemplateSettings,
    ) -> None:
        """Insert marks into texts of the conversation that spell a control token; none if no text does."""
        original = {"messages": messages, "tools": tools, "variables": settings.variables}
        self._mark = splitter.mark_for(original)
        marked = original if self._mark is None else splitter.insert_marks(original, self._mark)
        assert isinstance(marked, dict)
        self._messages, self._tools = marked["messages"], marked["tools"]
        self._settings = replace(settings, variables=marked["variables"])
        self._template = template

    def text(self, count: int, *, opened: bool = False) -> tuple[str, list[int]]:
        """Render the first `count` messages, with generation prompt if `opened`; return text and inert positions."""
        text = self._template.render(
            self._messages[:count], tools=self._tools, add_generation_prompt=opened, settings=self._settings
        )
        return remove_marks(text, self._mark)


@dataclass(frozen=True)
class Written:
    """Rendered conversation."""

    text: str
    inert: Sequence[int] | None  # positions that no control token may span; None: plain text, without control tokens


class Chats:
    """Chat format of one model."""

    def __init__(self, templates: Callable[[], Mapping[str, str]], tokenizer: Tokenizer, *, path: str | Path) -> None:
        """Store the arguments; `templates` is called for the sources at the first conversation."""
        self._read, self._tokenizer, self._path = templates, tokenizer, path
        self.breaker = Splitter(tokenizer.control_texts)  # splits control token texts
        self.settings = TemplateSettings()  # default settings of conversations

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None = None,
        settings: TemplateSettings | None = None,
    ) -> Conversation:
        """Create a conversation; FormatError if the model has no chat template, or an invalid one."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise _no_template(self._templates, self._path)
        return Conversation(messages, tools, self._templates[name], self.breaker, settings or self.settings)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation with generation prompt as token ids; the content of messages stays text."""
        return self.encoded(self.written(messages))

    def written(self, messages: Sequence[Message]) -> Written:
        """Render a conversation with generation prompt; FormatError if there is no chat template."""
        return self._written(messages, self.settings, opened=True)

    @property
    def has_template(self) -> bool:
        """True if the model has a template, valid or not."""
        return bool(self._read())

    def template_mentions(self, text: str) -> bool:
        """Check if the source of a template contains a text, such as the name of a variable."""
        return any(text in source for source in self._read().values())

    def spoken(
        self, messages: Sequence[Message], *, opened: bool = True, variables: Mapping[str, object] | None = None
    ) -> Written:
        """Render a conversation of a chat, with generation prompt if `opened`.

        Without a template, the contents are joined by blank lines. `variables` override those of the settings.
        FormatError if the template cannot render the messages.
        """
        if not self.has_template:
            for index, message in enumerate(messages):
                refuse_media(Fields({}, self._path), f"messages[{index}]", message)
            _require_calls_rendered(messages, lambda changed, _: [_join_contents(changed)], path=self._path)
            return Written(_join_contents(messages), None)
        checked = checked_messages(Fields({}, self._path), "messages", list(messages))
        return self._written(checked, self._settings_with(variables), opened=opened)

    def unwritten(
        self, messages: Sequence[Message], *, variables: Mapping[str, object] | None = None
    ) -> list[tuple[int, str]]:
        """Return the message keys that `spoken` ignores, each with the index of its first message.

        The template runs once or twice, then once per key; FormatError for more than `MOST_KEYS` keys.
        """
        n_keys = len(further_keys(messages))
        if not n_keys:
            return []
        if n_keys > MOST_KEYS:
            expected = f"at most {MOST_KEYS} keys beside role and content"
            raise Fields({}, self._path).error("OutOfRange", "messages", expected, n_keys)
        settings = self._settings_with(variables)

        def texts(changed: Sequence[Message], tools: Sequence[object] | None) -> Iterator[str]:
            if not self.has_template:
                yield _join_contents(changed)
                return
            checked = checked_messages(Fields({}, self._path), "messages", list(changed))
            yield self.conversation(checked, tools, settings).text(len(checked), opened=True)[0]

        keys = unrendered_message_keys(messages, None, texts, [*texts(messages, None)])
        # Reversed, so that the first message with a key overwrites later ones.
        first = {(str(m["role"]), key): index for index, m in reversed([*enumerate(messages)]) for key in m}
        return [(first[role, key], key) for role, key in keys]

    def _settings_with(self, variables: Mapping[str, object] | None) -> TemplateSettings:
        return replace(self.settings, variables={**(self.settings.variables or {}), **(variables or {})})

    def _written(self, messages: Sequence[Message], settings: TemplateSettings, *, opened: bool) -> Written:
        def texts(changed: Sequence[Message], tools: Sequence[object] | None) -> Iterator[str]:
            yield self.conversation(changed, tools, settings).text(len(changed), opened=opened)[0]

        rendered = Written(*self.conversation(messages, settings=settings).text(len(messages), opened=opened))
        _require_calls_rendered(messages, texts, path=self._path)
        return rendered

    def encoded(self, rendered: Written) -> list[int]:
        """Encode a rendered conversation as token ids."""
        if rendered.inert is None:
            return self._tokenizer.encode(rendered.text)
        return self._tokenizer.encode_rendered(rendered.text, inert=rendered.inert)[0]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Control token that the template writes after the assistant's content (a set of one), or no token.

        It may differ from the EOS in the files.
        """
        if not self.has_template:
            return frozenset()
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        text, _ = self.conversation(probe).text(2)
        ids, starts = self._tokenizer.encode_rendered(text)
        probe_start = text.rfind(_PROBE)
        following_ids = [token_id for token_id, start in zip(ids, starts, strict=True) if start > probe_start]
        return frozenset([token_id for token_id in following_ids if token_id in self._tokenizer.control_ids][:1])

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return compiled(self._read(), self._tokenizer, path=self._path)


def _no_template(names: Collection[str], path: str | Path) -> FormatError:
    """Return the error for a missing default template; `names` are the model's other templates."""
    if names:
        message = f"expected a default chat template, got only templates with names ({', '.join(sorted(names))})"
        remedy = "write one of them to chat_template.jinja in the Hugging Face folder, which makes it the default"
    else:
        message = "expected a chat template for a conversation, the model has none"
        remedy = "add chat_template.jinja to the Hugging Face folder, or use plain text"
        remedy += " (a prompt, or rows of prompt and completion)"
    return FormatError("Missing", f"{message}; {remedy}", path=path)


def _join_contents(messages: Sequence[Message]) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def _require_calls_rendered(messages: Sequence[Message], texts: Texts, *, path: str | Path) -> None:
    if any(message.get(key) for message in messages for key in CALLS):
        call = unrendered_call(messages, None, texts, [*texts(messages, None)])
        if call is not None:
            message = "expected a chat template that writes tool calls, the model's chat template omits them"
            raise FormatError("Unsupported", f"messages{call}: {message}; write the calls into the content", path=path)


def _match_any(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def remove_marks(text: str, mark: str | None) -> tuple[str, list[int]]:
    """Remove the marks from a rendered text; return the text and the positions of the marks."""
    if mark is None:
        return text, []
    parts = re.split(f"{mark}|\\\\u{ord(mark):04x}", text)  # a template may write non-ASCII characters as escapes
    positions, position = [], 0
    for part in parts[:-1]:
        position += len(part)
        positions.append(position)
    return "".join(parts), positions


def _texts(values: object) -> Iterator[str]:
    """Yield every text in nested values, also keys, except values that templates compare."""
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


def _map_texts(values: object, change: Callable[[str], str]) -> object:
    """Copy nested values with every text changed, except values that templates compare."""
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        return {
            key if key in _NAMES else change(key): value if key in _NAMES else _map_texts(value, change)
            for key, value in values.items()
        }
    if isinstance(values, Sequence):
        return [_map_texts(value, change) for value in values]
    return values


GENERATION = "generation_config.json"  # transformers' generation settings


def unnamed_ends(ids: Collection[int], folder: str | Path) -> list[int]:
    """Return those end tokens of `ids` at which transformers would not stop; none for a GGUF file (ends by text)."""
    return sorted({*ids} - {*_read_ends(Path(folder))}) if Path(folder).is_dir() else []


def chat_ends(folder: Path) -> frozenset[int]:
    """Return the end-of-turn token of a folder's chat template, as a set; empty without a valid template."""
    try:
        tokenizer = Tokenizer.from_huggingface(folder)
        return Chats(lambda: read_templates(folder), tokenizer, path=folder).end_ids
    except (FormatError, FileNotFoundError):
        return frozenset()


def with_ends(folder: Path, additional: Collection[int]) -> dict[str, object]:
    """Return the values of a `generation_config.json`, the folder's or a new one, with additional end tokens."""
    values = _text_settings(folder)
    if not (folder / GENERATION).exists():
        values = {key: values[key] for key in ("bos_token_id", "pad_token_id") if values.get(key) is not None}
    return {**values, "eos_token_id": [*_read_ends(folder), *additional]}


def _read_ends(folder: Path) -> list[int]:
    value = _text_settings(folder).get("eos_token_id")
    return [token_id for token_id in (value if isinstance(value, list) else [value]) if type(token_id) is int]


def _text_settings(folder: Path) -> Mapping[str, object]:
    """Return the folder's generation settings, else its configuration with the text part's keys."""
    if (folder / GENERATION).exists():
        return read_settings(folder / GENERATION)
    values = read_settings(folder / "config.json")
    text = values.get("text_config")
    return {**text, **values} if isinstance(text, dict) else values
