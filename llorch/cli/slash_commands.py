"""The commands inside of `llorch chat`: each changes the conversation, and gives a line to show or an answer."""

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
    """The user has had enough."""


def obey(talk: ChatSession, line: str) -> Outcome:
    """Do what a line that begins with `/` says; ValueError where it cannot be done, Quit at the end."""
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        raise UserError(
            f"chat: there is no command /{name}{suggestion(name, COMMANDS)}; see /help, or begin a message with //"
        )
    return COMMANDS[name][2](talk, rest.strip())


def show_help(talk: ChatSession, rest: str) -> str:
    """List all commands."""
    names = {f"/{name} {wants}".strip(): text for name, (wants, text, _) in COMMANDS.items()}
    return "\n".join(f"{name:22}{text}" for name, text in names.items())


def stats(talk: ChatSession, rest: str) -> str:
    """Format the speed of the last answer and the share of the context in use."""
    room = talk.model.config.max_position_embeddings
    used = f"{len(talk.ids()) if talk.messages else 0} of {room} tokens of context used"
    counted = talk.counted
    if counted is None or not counted.n_tokens:
        return used
    said = f"read {counted.n_prompt} tokens ({counted.n_cached} of them cached) in {counted.first:.3f} s"
    n_more = counted.n_tokens - 1
    rate = f", {n_more} more in {counted.rest:.3f} s ({n_more / counted.rest:.1f} tokens/s)" if n_more else ""
    return f"{said}, wrote {counted.n_tokens}{rate}; {used}"


def history(talk: ChatSession, rest: str) -> str:
    """List the messages with their numbers."""
    lines = [f"{n} {message['role']}: {message['content']}" for n, message in enumerate(talk.messages, start=1)]
    return "\n".join(map(printable, lines)) or "no messages yet"


def trace(talk: ChatSession, rest: str) -> str:
    """Write every stage of the conversation."""
    path = _path(rest)
    if path.suffix not in (".npz", ".safetensors"):
        raise UserError(f"chat: expected a name that ends in .npz or .safetensors, got {rest!r}")
    if not talk.messages:
        raise UserError("chat: expected a message to trace, got none; write a message first")
    ids, arrays = talk.ids(), talk.trace()
    write(path, arrays, {"engine": "llorch", "first_position": 0, "ids": ids, "model": talk.model.name})
    return f"wrote {len(arrays)} stages of {len(ids)} tokens to {path}"


def save(talk: ChatSession, rest: str) -> str:
    """Write the messages, as --history reads them."""
    path = _path(rest)
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(talk.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return f"wrote {len(talk.messages)} messages to {path}"


def load(talk: ChatSession, rest: str) -> Outcome:
    """Read messages; answer where the last one is the user's."""
    messages = read_history(_path(rest))
    if messages[-1]["role"] == "user":
        return talk.answer(messages)
    talk.messages = messages
    return f"{len(messages)} messages"


def system(talk: ChatSession, rest: str) -> str:
    """Put another system message first, or none."""
    others = [message for message in talk.messages if message["role"] != "system"]
    talk.messages = [{"role": "system", "content": rest}, *others] if rest else others
    return "system message " + ("set" if rest else "removed")


def edit(talk: ChatSession, rest: str) -> Outcome:
    """Write an earlier message anew; what came after it is gone."""
    if not talk.messages:
        raise UserError("chat: expected a message in the conversation, got none; write a message first")
    number, _, text = rest.partition(" ")
    if not number.isdecimal() or not 1 <= int(number) <= len(talk.messages) or not text.strip():
        raise UserError(f"chat: expected /edit N TEXT, N from 1 to {len(talk.messages)} (see /history), got {rest!r}")
    before, role = talk.messages[: int(number) - 1], talk.messages[int(number) - 1]["role"]
    messages = [*before, {"role": role, "content": text.strip()}]
    if role == "user":
        return talk.answer(messages)
    talk.messages = messages
    return f"{len(messages)} messages"


def retry(talk: ChatSession, rest: str) -> Outcome:
    """Answer once more, with other draws."""
    return talk.answer(_up_to_user(talk))


def undo(talk: ChatSession, rest: str) -> str:
    """Take back what the user said last, and its answer."""
    talk.messages = _up_to_user(talk)[:-1]
    return f"{len(talk.messages)} messages"


def settings(talk: ChatSession, rest: str) -> str:
    """Change how answers are sampled, or show it."""
    known = {field.name: type(getattr(talk.settings, field.name)) for field in fields(SamplingSettings)}
    name, _, value = rest.partition(" ")
    kind = int if name == "max_tokens" else known.get(name)
    if rest and kind is None:
        there_are = ", ".join([*known, "max_tokens"])
        raise UserError(f"chat: expected one of the settings {there_are}, got {name!r}{suggestion(name, known)}")
    if kind is not None:
        _set_option(talk, name, kind, value.strip())
    now = {name: getattr(talk.settings, name) for name in known} | {"max_tokens": talk.max_tokens}
    return " ".join(f"{name}={value}" for name, value in now.items())


def _set_option(talk: ChatSession, name: str, kind: type, text: str) -> None:
    try:
        value = kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise UserError(f"chat: {name} must be {wanted}, got {text!r}") from None
    if name != "max_tokens":
        talk.settings = replace(talk.settings, **{name: value})
    elif value < 1:
        raise UserError(f"chat: max_tokens must be at least 1, got {value}")
    else:
        talk.max_tokens = value


def adapter(talk: ChatSession, rest: str) -> str:
    """Answer through an adapter from now on, or through none."""
    path = None if rest == NONE else _path(rest)
    return f"{rest}: {talk.use_adapter(path)}"


def leave(talk: ChatSession, rest: str) -> str:
    """End the chat."""
    raise Quit


def _path(rest: str) -> Path:
    if not rest:
        raise UserError("chat: expected a file name, got none")
    return Path(rest).expanduser()


def _up_to_user(talk: ChatSession) -> list[dict[str, object]]:
    """Return the messages up to the last one of the user."""
    places = [at for at, message in enumerate(talk.messages) if message["role"] == "user"]
    if not places:
        raise UserError("chat: expected a message in the conversation, got none; write a message first")
    return talk.messages[: places[-1] + 1]


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
