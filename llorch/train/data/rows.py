"""What a row of data says, whatever format it was written in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Message = Mapping[str, object]


@dataclass(frozen=True)
class Text:
    """Plain text, learned whole."""

    text: str


@dataclass(frozen=True)
class Completion:
    """A text and how it goes on."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: Sequence[Message]  # as a chat template takes them
    tools: Sequence[object] | None  # functions that the assistant may call
    learned: Sequence[int]  # places of the turns that may be learned, all of them turns of the assistant


@dataclass(frozen=True)
class Tokens:
    """Token ids, and those that are learned (`IGNORED` elsewhere); all of them without labels."""

    ids: Sequence[int]
    labels: Sequence[int] | None


@dataclass(frozen=True)
class Instruction:
    """An instruction and its answer."""

    chat: Chat  # for models with a chat template
    plain: Completion | None  # for models without one; None when it cannot be said this way


Parsed = Text | Completion | Chat | Instruction | Tokens
