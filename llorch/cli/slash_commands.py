"""Commands of `llorch chat`: each changes the conversation, and returns a line to print or an answer."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from llorch.cli.chat_session import ChatSession
from llorch.cli.inputs import read_history
from llorch.cli.trace import write
from llorch.files.new_file import new_file
from llorch.model.generate import Token
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError, printable, suggestion

Outcome = str | Iterator[Token]
NONE = "none"


class Quit(Exception):
    """Signal that the user ends the chat."""


def obey(session: ChatSession, line: str) -> Outcome:
    """Run a command line that begins with `/`; UserError if the command is impossible, Quit for /quit."""
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
        raise UserError(
            f"chat: there is no command /{name}{suggestion(name, COMMANDS)}; see /help, or begin a message with //"
        )
    return COMMANDS[name][2](session, argument.strip())


def show_help(session: ChatSession, argument: str) -> str:
    """List all commands."""
    names = {f"/{name} {arguments}".strip(): text for name, (arguments, text, _) in COMMANDS.items()}
    return "\n".join(f"{name:22}{text}" for name, text in names.items())


def stats(session: ChatSession, argument: str) -> str:
    """Format the speed of the last answer and the share of the context in use."""
    n_context = session.model.config.max_position_embeddings
    usage = f"{len(session.ids()) if session.messages else 0} of {n_context} tokens of context used"
    counts = session.counted
    if counts is None or not counts.n_tokens:
        return usage
    report = f"read {counts.n_prompt} tokens ({counts.n_cached} of them cached) in {counts.first:.3f} s"
    n_decoded = counts.n_tokens - 1
    rate = f", {n_decoded} more in {counts.rest:.3f} s ({n_decoded / counts.rest:.1f} tokens/s)" if n_decoded else ""
    return f"{report}, wrote {counts.n_tokens}{rate}; {usage}"


def history(session: ChatSession, argument: str) -> str:
    """List the messages with their numbers."""
    lines = [f"{n} {message['role']}: {message['content']}" for n, message in enumerate(session.messages, start=1)]
    return "\n".join(map(printable, lines)) or "no messages yet"


def trace(session: ChatSession, argument: str) -> str:
    """Write every stage of the conversation."""
    path = _path(argument)
    if path.suffix not in (".npz", ".safetensors"):
        raise UserError(f"chat: expected a name that ends in .npz or .safetensors, got {argument!r}")
    if not session.messages:
        raise UserError("chat: expected a message to trace, got none; write a message first")
    ids, arrays = session.ids(), session.trace()
    write(path, arrays, {"engine": "llorch", "first_position": 0, "ids": ids, "model": session.model.name})
    return f"wrote {len(arrays)} stages of {len(ids)} tokens to {path}"


def save(session: ChatSession, argument: str) -> str:
    """Write the messages, as --history reads them."""
    path = _path(argument)
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(session.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return f"wrote {len(session.messages)} messages to {path}"


def load(session: ChatSession, argument: str) -> Outcome:
    """Read messages; answer if the last one is from the user."""
    messages = read_history(_path(argument))
    if messages[-1]["role"] == "user":
        return session.answer(messages)
    session.messages = messages
    return f"{len(messages)} messages"


def system(session: ChatSession, argument: str) -> str:
    """Set the system message, or remove it."""
    without_system = [message for message in session.messages if message["role"] != "system"]
    session.messages = [{"role": "system", "content": argument}, *without_system] if argument else without_system
    return "system message " + ("set" if argument else "removed")


def edit(session: ChatSession, argument: str) -> Outcome:
    """Replace an earlier message; the messages after it are deleted."""
    if not session.messages:
        raise UserError("chat: expected a message in the conversation, got none; write a message first")
    number, _, text = argument.partition(" ")
    if not number.isdecimal() or not 1 <= int(number) <= len(session.messages) or not text.strip():
        raise UserError(
            f"chat: expected /edit N TEXT, N from 1 to {len(session.messages)} (see /history), got {argument!r}"
        )
    earlier, role = session.messages[: int(number) - 1], session.messages[int(number) - 1]["role"]
    messages = [*earlier, {"role": role, "content": text.strip()}]
    if role == "user":
        return session.answer(messages)
    session.messages = messages
    return f"{len(messages)} messages"


def retry(session: ChatSession, argument: str) -> Outcome:
    """Answer again, with other random draws."""
    return session.answer(_messages_up_to_user(session))


def undo(session: ChatSession, argument: str) -> str:
    """Remove the last user message and its answer."""
    session.messages = _messages_up_to_user(session)[:-1]
    return f"{len(session.messages)} messages"


def settings(session: ChatSession, argument: str) -> str:
    """Set how answers are sampled, or show the settings."""
    kinds = {field.name: type(getattr(session.settings, field.name)) for field in fields(SamplingSettings)}
    name, _, value = argument.partition(" ")
    kind = int if name == "max_tokens" else kinds.get(name)
    if argument and kind is None:
        names = ", ".join([*kinds, "max_tokens"])
        raise UserError(f"chat: expected one of the settings {names}, got {name!r}{suggestion(name, kinds)}")
    if kind is not None:
        _set_option(session, name, kind, value.strip())
    current_settings = {name: getattr(session.settings, name) for name in kinds} | {"max_tokens": session.max_tokens}
    return " ".join(f"{name}={value}" for name, value in current_settings.items())


def _set_option(session: ChatSession, name: str, kind: type, text: str) -> None:
    try:
        value = kind(text)
    except ValueError:
        expectation = "an integer" if kind is int else "a number"
        raise UserError(f"chat: {name} must be {expectation}, got {text!r}") from None
    if name != "max_tokens":
        session.settings = replace(session.settings, **{name: value})
    elif value < 1:
        raise UserError(f"chat: max_tokens must be at least 1, got {value}")
    else:
        session.max_tokens = value


def adapter(session: ChatSession, argument: str) -> str:
    """Answer through an adapter, or through none."""
    path = None if argument == NONE else _path(argument)
    return f"{argument}: {session.use_adapter(path)}"


def leave(session: ChatSession, argument: str) -> str:
    """End the chat."""
    raise Quit


def _path(argument: str) -> Path:
    if not argument:
        raise UserError("chat: expected a file name, got none")
    return Path(argument).expanduser()


def _messages_up_to_user(session: ChatSession) -> list[dict[str, object]]:
    """Return the messages up to the user's last message, included."""
    user_indices = [index for index, message in enumerate(session.messages) if message["role"] == "user"]
    if not user_indices:
        raise UserError("chat: expected a message in the conversation, got none; write a message first")
    return session.messages[: user_indices[-1] + 1]


COMMANDS: dict[str, tuple[str, str, Callable[[ChatSession, str], Outcome]]] = {
    "stats": ("", "speed of the last answer, context tokens in use", stats),
    "history": ("", "list the messages with numbers", history),
    "edit": ("N TEXT", "replace message N, delete later messages, answer again", edit),
    "retry": ("", "answer again with other random draws", retry),
    "undo": ("", "delete your last message and its answer", undo),
    "system": ("[TEXT]", "set or remove the system message", system),
    "set": ("[NAME VALUE]", "set sampling, such as temperature 0.8, or max_tokens", settings),
    "adapter": ("PATH|none", "answer with a LoRA adapter, or none", adapter),
    "save": ("FILE", "write the messages, as --history reads them", save),
    "load": ("FILE", "read messages; answer if the last one is from the user", load),
    "trace": ("FILE", "write every stage to .npz or .safetensors", trace),
    "help": ("", "list the commands", show_help),
    "quit": ("", "quit, like Ctrl-D", leave),
}
