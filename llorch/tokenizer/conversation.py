"""Conversations as a model reads them: a chat template writes them, and what users wrote stays plain text in them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from llorch.errors import FormatError
from llorch.tokenizer.chat import ChatTemplate, Message, compiled
from llorch.tokenizer.inert import Breaker, taken_out
from llorch.tokenizer.tokenizer import Tokenizer

_PROBE = "Yes."


class Conversation:
    """Renders the beginnings of one conversation."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[object] | None, template: ChatTemplate, breaker: Breaker
    ) -> None:
        """Break control tokens in the words of users."""
        both = {"messages": messages, "tools": tools}
        self._mark = breaker.mark_for(both)
        broken = both if self._mark is None else breaker.broken(both, self._mark)
        assert isinstance(broken, dict)
        self._messages, self._tools = broken["messages"], broken["tools"]
        self._template = template

    def text(self, count: int, *, opened: bool = False) -> tuple[str, list[int]]:
        """The first messages as text, `opened` with what opens a turn of the assistant; and the inert places in it."""
        text = self._template.render(self._messages[:count], tools=self._tools, add_generation_prompt=opened)
        return taken_out(text, self._mark)


class Chats:
    """How one model writes conversations."""

    def __init__(self, templates: Callable[[], Mapping[str, str]], tokenizer: Tokenizer, *, path: str | Path) -> None:
        """Prepare; templates are read and checked when the first conversation comes."""
        self._read, self._tokenizer, self._path = templates, tokenizer, path
        self.breaker = Breaker(tokenizer.control_texts)  # knows the texts of control tokens

    def conversation(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> Conversation:
        """Take up a conversation; FormatError where the model has no chat template, or one that is none."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            message = (
                "a conversation needs a chat template, and the model has none: put a chat_template.jinja beside a"
                " Hugging Face model, or use plain text (a prompt; rows of prompt and completion)"
            )
            raise FormatError("Missing", message, path=self._path)
        return Conversation(messages, tools, self._templates[name], self.breaker)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to the answer that is wanted, as token ids; what is in the messages stays text."""
        text, inert = self.conversation(messages).text(len(messages), opened=True)
        return self._tokenizer.encode_rendered(text, inert=inert)[0]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The control token that the template writes behind the words of the assistant, whatever files say of it."""
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        text, _ = self.conversation(asked).text(2)
        ids, starts = self._tokenizer.encode_rendered(text)
        said = text.rfind(_PROBE)
        behind = [one for one, start in zip(ids, starts, strict=True) if start > said]
        return frozenset([one for one in behind if one in self._tokenizer.control_ids][:1])

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return compiled(self._read(), self._tokenizer, path=self._path)
