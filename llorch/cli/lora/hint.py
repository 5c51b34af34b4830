"""The command that shows what an adapter learned: it asks for something that the training data asks for."""

import shlex
from itertools import islice
from pathlib import Path

from llorch.builtin import find_data
from llorch.files import open_weights
from llorch.model import Opened, find
from llorch.train.data.formats import Chat, Completion, Instruction, Parsed, Text, Tokens, format_of, parse
from llorch.train.data.read import find_splits, read_records

_ROWS, _CHARACTERS = 50, 400  # looked at; most that are shown
_BEGINNING = 4  # words or tokens of a text


def try_it(model: str, data: str, adapter: Path) -> str:
    """A command line, quoted for a shell, that runs an adapter on the first short question of its data."""
    opened = Opened(open_weights(find(model)))
    records = islice(read_records(find_splits(find_data(data))["train"]), _ROWS)
    found = (_asked(parse(record, format_of(record)), opened) for record in records)
    asked = next(filter(None, found), ["Once upon a time"])
    return shlex.join(["llorch", "run", model, *asked, "--adapter", str(adapter)])


def _asked(row: Parsed, model: Opened) -> list[str]:
    """What a row asks, as arguments; nothing when that is no short text."""
    match row:
        case Instruction():
            return _asked(row.chat if model.chat_templates or row.plain is None else row.plain, model)
        case Chat():
            first, second = [*row.messages, {}][:2]
            system, user = (first, second) if first["role"] == "system" else ({}, first)
            options = {"--chat": user, "--system": system} if user.get("role") == "user" else {}
            said = {option: str(message["content"]) for option, message in options.items() if message}
            return [f"{option}={text}" for option, text in said.items()] if all(map(_short, said.values())) else []
        case Completion():
            text = row.prompt or _beginning(row.completion)
        case Text():
            text = _beginning(row.text)
        case Tokens():
            text = model.tokenizer.decode(row.ids[:_BEGINNING])
    return [text] if _short(text) and not text.startswith("-") else []


def _beginning(text: str) -> str:
    return " ".join(text.split()[:_BEGINNING])


def _short(text: str) -> bool:
    return 0 < len(text) <= _CHARACTERS and text.replace("\n", " ").isprintable()
