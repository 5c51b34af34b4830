"""Checks of conversations in the format of OpenAI and transformers, and of message keys that a chat template ignores.

A template ignores unknown keys of a message without an error. So each key is tested by its effect: if a conversation
without the key renders to the same text, the template does not write the key.

Source: transformers apply_chat_template (role, content, tool_calls, reasoning_content).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from llorch.files.tokenizer.chat import Message
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # keys with other media than text
ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(fields: Fields, key: str, value: object) -> list[dict[str, object]]:
    """Check a list of messages and convert it to the form for chat templates."""
    if not isinstance(value, list) or not value:
        raise fields.error("Malformed", key, "a list of messages", value)
    return [_checked_message(fields, f"{key}[{index}]", entry) for index, entry in enumerate(value)]


def refuse_media(fields: Fields, name: str, message: Mapping[str, object]) -> None:
    """Raise Unsupported for a message with an image, a video or audio: llorch reads text only."""
    media = [key for key in MEDIA if message.get(key) not in (None, "", [], {})]
    if media:
        expected = f"no {media[0]} (llorch reads no images, audio or files)"
        raise fields.error("Unsupported", f"{name}.{media[0]}", expected, message[media[0]])


def parsed(text: str) -> object:
    """Parse a JSON text; return any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tool_call(fields: Fields, name: str, call: object) -> dict[str, object]:
    """Check a function call, and convert it to the form for templates.

    Input: `{"name", "arguments"}`, possibly as `function` of an object; arguments may be JSON text, null or "".
    Output: `{"type": "function", "function": {"name", "arguments"}}`, with the `id` of the object.
    """
    call_object = call if isinstance(call, Mapping) else {}
    function = call_object.get("function", call_object)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise fields.error("Malformed", name, "a call with the name of a function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise fields.error("Malformed", f"{name}.arguments", "an object, or the JSON text of one", arguments)
    id_entry = {key: value for key, value in call_object.items() if key == "id"}
    return id_entry | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _content_text(fields: Fields, name: str, part: object) -> str:
    """Read the text of a content part in OpenAI's format; Unsupported for an image."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise fields.error("Malformed", name, "a part with a type and a text", part)
    if part["type"] != "text":
        raise fields.error("Unsupported", f"{name}.type", "text (llorch reads no images, audio or files)", part["type"])
    if not isinstance(part.get("text"), str):
        raise fields.error("Malformed", f"{name}.text", "a text", part.get("text"))
    return part["text"]


def _checked_message(fields: Fields, name: str, entry: object) -> dict[str, object]:
    """Check one message of a conversation; its content becomes one text."""
    if not isinstance(entry, dict):
        raise fields.error("Malformed", name, "an object with role and content", entry)
    refuse_media(fields, name, entry)
    role, content, calls = entry.get("role"), entry.get("content"), entry.get("tool_calls")
    if role not in ROLES:
        raise fields.error("Unsupported", f"{name}.role", f"one of {', '.join(ROLES)}", role)
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise fields.error("Malformed", f"{name}.tool_calls", "a list in a message of the assistant", calls)
    if isinstance(content, list):
        content = "".join(_content_text(fields, f"{name}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str) and not (content is None and calls):
        raise fields.error("Malformed", f"{name}.content", "a text", content)
    if not isinstance(entry.get("reasoning_content", ""), str | None):
        raise fields.error("Malformed", f"{name}.reasoning_content", "a text", entry["reasoning_content"])
    message: dict[str, object] = {**entry, "content": content or ""}  # many templates fail on a call without content
    if calls:
        message["tool_calls"] = [tool_call(fields, f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return message


CALLS = ("tool_calls", "function_call")
Texts = Callable[[Sequence[Message], Sequence[object] | None], Iterable[str]]  # renders messages with tools
_EMPTY = (None, "", [], {})  # values that mean an absent key


def unrendered_call(
    messages: Sequence[Message], tools: Sequence[object] | None, texts: Texts, rendered: Sequence[str]
) -> str | None:
    """Return the first tool calls that the template ignores, as `[2].tool_calls`; `rendered` has the texts of all."""
    for index, message in enumerate(messages):
        for key in CALLS:
            if message.get(key) in _EMPTY:
                continue
            changed = [*messages[:index], _without(message, key), *messages[index + 1 :]]
            if _equal(rendered, texts, changed, tools):
                return f"[{index}].{key}"
    return None


def unrendered_keys(
    messages: Sequence[Message], tools: Sequence[object] | None, texts: Texts, rendered: Sequence[str]
) -> Iterator[str]:
    """Yield everything that is not in `rendered`: `tools`, a key of the messages of a role, or their content."""
    if tools and _equal(rendered, texts, messages, None):
        yield "tools"
    for role, key in unrendered_message_keys(messages, tools, texts, rendered):
        yield f"{key} of {role}"
    for index, message in enumerate(messages):
        content = str(message["content"]).strip()
        if content and not any(content in text for text in rendered):
            changed = [*messages[:index], {**message, "content": ""}, *messages[index + 1 :]]
            if _equal(rendered, texts, changed, tools):
                yield f"content of {message['role']}"


def unrendered_message_keys(
    messages: Sequence[Message], tools: Sequence[object] | None, texts: Texts, rendered: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (role, key) for each key of messages that is not in `rendered`."""
    keys = further_keys(messages)
    stripped = [{key: message[key] for key in message if key not in _further_keys(message)} for message in messages]
    is_none_written = len(keys) > 1 and _equal(rendered, texts, stripped, tools)
    for role, key in keys:
        changed = [_without(message, key) if message["role"] == role else message for message in messages]
        if is_none_written or _equal(rendered, texts, changed, tools):
            yield role, key


def further_keys(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return (role, key) for each key with a value, except role, content and tool calls."""
    return [*dict.fromkeys((str(message["role"]), key) for message in messages for key in _further_keys(message))]


def _further_keys(message: Message) -> list[str]:
    return [key for key, value in message.items() if key not in ("role", "content", *CALLS) and value not in _EMPTY]


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _equal(rendered: Sequence[str], texts: Texts, messages: Sequence[Message], tools: Sequence[object] | None) -> bool:
    """Check if changed messages render to the same texts; False if the template raises, because it needs the key."""
    try:
        return all(expected == actual for expected, actual in zip(rendered, texts(messages, tools), strict=True))
    except FormatError:
        return False
