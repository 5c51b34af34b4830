"""Find what a conversation says and its chat template does not write.

A template writes the keys of a message that it knows, and no template complains of others. So each key is judged by
its effect: a conversation without the key that gives the same texts shows that the template does not write it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from llorch.files.tokenizer.chat import Message
from llorch.runtime.errors import FormatError

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
