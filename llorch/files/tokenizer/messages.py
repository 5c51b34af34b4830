"""Conversations: messages as OpenAI and transformers write them, checked.

Source: transformers apply_chat_template (role, content, tool_calls, reasoning_content).
"""

import json
from collections.abc import Mapping

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
        key = media[0]
        raise fields.error(
            "Unsupported", f"{name}.{key}", f"no {key} (llorch reads no images, audio or files)", message[key]
        )


def parsed(text: str) -> object:
    """Parse a JSON text; return any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tool_call(fields: Fields, name: str, call: object) -> dict[str, object]:
    """Check a call of a function, and bring it into the form that templates take.

    It comes as `{"name", "arguments"}`, perhaps as `function` of an object, arguments perhaps as JSON text; it leaves
    as `{"type": "function", "function": {"name", "arguments"}}` and whatever else the object says. Some clients write
    no arguments as an empty text or null.
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
