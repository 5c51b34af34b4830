"""Conversations: messages as OpenAI and transformers write them, checked; and what a chat template leaves out of them.

A template writes the keys of a message that it knows, and no template complains of others. So each key is judged by
its effect: a conversation without the key that gives the same texts shows that the template does not write it.

Source: transformers apply_chat_template (role, content, tool_calls, reasoning_content).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from llorch.files.tokenizer.chat import Message
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # keys of rows and messages that hold more than text
ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(fields: Fields, key: str, value: object) -> list[dict[str, object]]:
    """Check a list of messages and bring it into the form that chat templates take."""
    if not isinstance(value, list) or not value:
        raise fields.error("Malformed", key, "a list of messages", value)
    return [_checked_message(fields, f"{key}[{place}]", entry) for place, entry in enumerate(value)]


def refuse_media(fields: Fields, name: str, message: Mapping[str, object]) -> None:
    """Refuse a message with an image, a video or audio: llorch reads text only."""
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
    """Check a call of a function, and bring it into the form that templates take.

    It comes as `{"name", "arguments"}`, perhaps as `function` of an object, arguments perhaps as JSON text, null or "";
    it leaves as `{"type": "function", "function": {"name", "arguments"}}`, with the `id` of the object.
    """
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function", outer)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise fields.error("Malformed", name, "a call with the name of a function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise fields.error("Malformed", f"{name}.arguments", "an object, or the JSON text of one", arguments)
    rest = {key: value for key, value in outer.items() if key == "id"}
    return rest | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _content_text(fields: Fields, name: str, part: object) -> str:
    """Read the text of a part of a content, as OpenAI writes them; Unsupported for an image."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise fields.error("Malformed", name, "a part with a type and a text", part)
    if part["type"] != "text":
        raise fields.error("Unsupported", f"{name}.type", "text (llorch reads no images, audio or files)", part["type"])
    if not isinstance(part.get("text"), str):
        raise fields.error("Malformed", f"{name}.text", "a text", part.get("text"))
    return part["text"]


def _checked_message(fields: Fields, name: str, entry: object) -> dict[str, object]:
    """Check one message of a conversation and return it with its content as one text."""
    if not isinstance(entry, dict):
        raise fields.error("Malformed", name, "an object with role and content", entry)
    refuse_media(fields, name, entry)
    role, content, calls = entry.get("role"), entry.get("content"), entry.get("tool_calls")
    if role not in ROLES:
        raise fields.error("Unsupported", f"{name}.role", f"one of {', '.join(ROLES)}", role)
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise fields.error("Malformed", f"{name}.tool_calls", "a list in a message of the assistant", calls)
    if isinstance(content, list):
        content = "".join(_content_text(fields, f"{name}.content[{i}]", one) for i, one in enumerate(content))
    if not isinstance(content, str) and not (content is None and calls):
        raise fields.error("Malformed", f"{name}.content", "a text", content)
    if not isinstance(entry.get("reasoning_content", ""), str | None):
        raise fields.error("Malformed", f"{name}.reasoning_content", "a text", entry["reasoning_content"])
    message: dict[str, object] = {**entry, "content": content or ""}  # many templates fail on a call without a text
    if calls:
        message["tool_calls"] = [tool_call(fields, f"{name}.tool_calls[{i}]", one) for i, one in enumerate(calls)]
    return message


CALLS = ("tool_calls", "function_call")
Texts = Callable[[Sequence[Message], Sequence[object] | None], Iterable[str]]  # renders a conversation
_EMPTY = (None, "", [], {})


def unwritten_call(
    messages: Sequence[Message], tools: Sequence[object] | None, texts: Texts, given: Sequence[str]
) -> str | None:
    """Name the first tool calls that the texts `given`, of these messages, do not show: `[2].tool_calls`."""
    for place, message in enumerate(messages):
        for key in CALLS:
            if message.get(key) in _EMPTY:
                continue
            altered = [*messages[:place], _without(message, key), *messages[place + 1 :]]
            if _same(given, texts, altered, tools):
                return f"[{place}].{key}"
    return None


def unwritten_keys(
    messages: Sequence[Message], tools: Sequence[object] | None, texts: Texts, given: Sequence[str]
) -> Iterator[str]:
    """Name what the texts `given` do not show: `tools`, a key of the messages of a role, or their whole content."""
    if tools and _same(given, texts, messages, None):
        yield "tools"
    for role, key in unwritten_message_keys(messages, tools, texts, given):
        yield f"{key} of {role}"
    for place, message in enumerate(messages):
        said = str(message["content"]).strip()
        if said and not any(said in text for text in given):
            altered = [*messages[:place], {**message, "content": ""}, *messages[place + 1 :]]
            if _same(given, texts, altered, tools):
                yield f"content of {message['role']}"


def unwritten_message_keys(
    messages: Sequence[Message], tools: Sequence[object] | None, texts: Texts, given: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Find the keys of messages that the texts `given` do not show, each with the role of its messages."""
    found = further_keys(messages)
    all_gone = [{key: m[key] for key in m if key not in _more_keys(m)} for m in messages]
    none_written = len(found) > 1 and _same(given, texts, all_gone, tools)
    for role, key in found:
        altered = [_without(m, key) if m["role"] == role else m for m in messages]
        if none_written or _same(given, texts, altered, tools):
            yield role, key


def further_keys(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """List the keys beside role, content and tool calls that have a value, each with the role of its messages."""
    return [*dict.fromkeys((str(m["role"]), key) for m in messages for key in _more_keys(m))]


def _more_keys(message: Message) -> list[str]:
    return [key for key, value in message.items() if key not in ("role", "content", *CALLS) and value not in _EMPTY]


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _same(given: Sequence[str], texts: Texts, messages: Sequence[Message], tools: Sequence[object] | None) -> bool:
    """Tell if changed messages give the same texts. A template that refuses them needs what was taken away."""
    try:
        return all(one == other for one, other in zip(given, texts(messages, tools), strict=True))
    except FormatError:
        return False
