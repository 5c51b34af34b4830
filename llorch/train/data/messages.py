"""Conversations to learn from.

Source: OpenAI fine-tuning format (`weight`: 0 keeps a turn of the assistant from being learned).
"""

from llorch.fields import Fields
from llorch.tokenizer.messages import checked_messages, parsed
from llorch.train.data.rows import Chat


def read_chat(fields: Fields, key: str, value: object) -> Chat:
    """Check a conversation; `weight` is no part of its messages any more."""
    messages, learned = read_messages(fields, key, value)
    return Chat(messages, read_tools(fields), learned)


def read_messages(fields: Fields, key: str, value: object) -> tuple[list[dict[str, object]], list[int]]:
    """Check a list of messages; also returned are the places of the turns that may be learned."""
    messages, learned = checked_messages(fields, key, value), []
    for place, message in enumerate(messages):
        weight = message.pop("weight", None)
        if weight not in (None, 0, 1):
            raise fields.error("OutOfRange", f"{key}[{place}].weight", "0 or 1", weight)
        if message["role"] == "assistant" and weight != 0:
            learned.append(place)
    return messages, learned


def read_tools(fields: Fields) -> list[object] | None:
    """Check the descriptions of tools, a list or the JSON text of one."""
    value = fields.values.get("tools")
    tools = parsed(value) if isinstance(value, str) else value
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.error("Malformed", "tools", "a list of objects", value)
    return tools
