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
    """A conversation.

    Attributes:
        messages: As a chat template takes them.
        tools: Functions that the assistant may call, or None.
        learned: Places of the turns that may be learned, all of them turns of the assistant.
    """

    messages: Sequence[Message]
    tools: Sequence[object] | None
    learned: Sequence[int]


@dataclass(frozen=True)
class Tokens:
    """Token ids, and those that are learned (`IGNORED` elsewhere); all of them without labels."""

    ids: Sequence[int]
    labels: Sequence[int] | None


@dataclass(frozen=True)
class Instruction:
    """An instruction and its answer.

    Attributes:
        chat: For models with a chat template.
        plain: For models without one; None when it cannot be said this way.
    """

    chat: Chat
    plain: Completion | None


Parsed = Text | Completion | Chat | Instruction | Tokens
