"""Where the turns of the assistant lie in a rendered conversation.

A turn reaches from the end of `render(chat before it, with the opening of a turn)` to the end of `render(chat up to and
with it)`: what the model is given and what it has to say from there, with the template as the only judge. Token ids are
not searched for anything.

Some templates write a turn differently once others follow (Qwen3 and DeepSeek-R1 leave the thinking of earlier turns
out). The turns of such a conversation do not lie in one text; it then becomes several examples, each of them as the
model sees it when it speaks, and each turn is learned in exactly one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llorch.errors import FormatError
from llorch.tokenizer.conversation import Conversation


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: Sequence[tuple[int, int]]  # first character of every learned part, and the one behind it
    inert: Sequence[int]  # places that no control token may run over


def render_turns(learned: Sequence[int], conversation: Conversation) -> list[Rendered]:
    """Render a conversation so that every learned turn (by place) stands as the model would say it.

    One text, or several when the template writes earlier turns differently; the last one has the last turn. FormatError
    where the template refuses the conversation, or does not open turns as it writes them.
    """
    turns = [_turn(conversation, place) for place in learned]
    found: list[Rendered] = []
    while turns:
        text, _, inert = turns[-1]
        inside = [turn for turn in turns if text.startswith(turn[0])]
        found.append(Rendered(text, [(start, len(part)) for part, start, _ in inside], inert))
        turns = [turn for turn in turns if not text.startswith(turn[0])]
    return found[::-1]


def _turn(conversation: Conversation, place: int) -> tuple[str, int, list[int]]:
    """The conversation up to and with a turn of the assistant, where the turn starts in it, and the inert places."""
    before, _ = conversation.text(place, opened=True)
    text, inert = conversation.text(place + 1)
    if not text.startswith(before):
        common = next(i for i, c in enumerate(before) if i >= len(text) or text[i] != c)
        raise FormatError(
            "Unsupported",
            f"chat template: the turn of the assistant at messages[{place}] is not written as the template opens"
            f" one: expected {before[common:][:40]!r}, got {text[common:][:40]!r}; what the model is asked and what"
            " it would learn differ. Use a template without that difference, or rows of prompt and completion",
        )
    return text, len(before), inert
