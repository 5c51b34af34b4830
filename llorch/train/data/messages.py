"""Conversations: messages as OpenAI and transformers write them, checked.

Source: transformers apply_chat_template (role, content, tool_calls, reasoning_content); OpenAI fine-tuning format
(`weight`: 0 keeps a turn of the assistant from being learned).
"""

import json
from collections.abc import Mapping

from llorch.fields import Fields
from llorch.train.data.rows import Chat

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_chat(fields: Fields, key: str, value: object) -> Chat:
    """Check a conversation.

    Args:
        fields: The row.
        key: Name of the messages, for errors.
        value: The messages.

    Returns:
        The conversation; `weight` is no part of its messages any more.

    Raises:
        FormatError: It is none.
    """
    messages, learned = read_messages(fields, key, value)
    return Chat(messages, read_tools(fields), learned)


def read_messages(fields: Fields, key: str, value: object) -> tuple[list[dict[str, object]], list[int]]:
    """Check a list of messages.

    Args:
        fields: The row.
        key: Name of the list, for errors.
        value: The list.

    Returns:
        The messages, and the places of the turns that may be learned.

    Raises:
        FormatError: Something in it is no message.
    """
    if not isinstance(value, list) or not value:
        raise fields.error("Malformed", key, "a list of messages", value)
    messages: list[dict[str, object]] = []
    learned: list[int] = []
    for place, entry in enumerate(value):
        name = f"{key}[{place}]"
        message = _read_message(fields, name, entry)
        weight = message.pop("weight", None)
        if weight not in (None, 0, 1):
            raise fields.error("OutOfRange", f"{name}.weight", "0 or 1", weight)
        if message["role"] == "assistant" and weight != 0:
            learned.append(place)
        messages.append(message)
    return messages, learned


def read_tools(fields: Fields) -> list[object] | None:
    """Check the descriptions of tools, a list or the JSON text of one.

    Args:
        fields: The row.

    Returns:
        The list, or None when there is none.

    Raises:
        FormatError: It is no list of objects.
    """
    value = fields.values.get("tools")
    tools = parsed(value) if isinstance(value, str) else value
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.error("Malformed", "tools", "a list of objects", value)
    return tools


def parsed(text: str) -> object:
    """The value of a JSON text; a text that is none stays what it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tool_call(fields: Fields, name: str, call: object) -> dict[str, object]:
    """Check a call of a function, and bring it into the form that templates take.

    Args:
        fields: The row.
        name: Of the value, for messages.
        call: `{"name", "arguments"}`, perhaps as `function` of an object; arguments may be JSON text.

    Returns:
        `{"type": "function", "function": {"name", "arguments"}}`, and whatever else the object says.

    Raises:
        FormatError: It is none.
    """
    outer = call if isinstance(call, Mapping) else {}
    function = outer.get("function", outer)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise fields.error("Malformed", name, "a call with the name of a function", call)
    arguments = function.get("arguments", {})
    arguments = parsed(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, Mapping):
        raise fields.error("Malformed", f"{name}.arguments", "an object, or the JSON text of one", arguments)
    rest = {key: value for key, value in outer.items() if key == "id"}
    return rest | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_message(fields: Fields, name: str, entry: object) -> dict[str, object]:
    if not isinstance(entry, dict):
        raise fields.error("Malformed", name, "an object with role and content", entry)
    role, content, calls = entry.get("role"), entry.get("content"), entry.get("tool_calls")
    if role not in ROLES:
        raise fields.error("Unsupported", f"{name}.role", f"one of {', '.join(ROLES)}", role)
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise fields.error("Malformed", f"{name}.tool_calls", "a list, in a turn of the assistant", calls)
    if not isinstance(content, str) and not (content is None and calls):
        raise fields.error("Malformed", f"{name}.content", "a text", content)
    if not isinstance(entry.get("reasoning_content", ""), str | None):
        raise fields.error("Malformed", f"{name}.reasoning_content", "a text", entry["reasoning_content"])
    message: dict[str, object] = {**entry, "content": content or ""}  # many templates fail on a call without a text
    if calls:
        message["tool_calls"] = [tool_call(fields, f"{name}.tool_calls[{i}]", one) for i, one in enumerate(calls)]
    return message
