"""Rows to examples: token ids, and which of them are learned.

A token is learned if its first character lies in a learned part of the text; one that starts before and runs into it
is not: the model would be given it. The beginning token comes from the vocabulary for plain text, from the template for
conversations, and stands there once. The end token goes after plain text and completions, once; conversations have
what the template writes, and after the end-of-turn token of a turn nothing more of it is learned.

A turn reaches from the end of `render(chat before it, with the opening of a turn)` to the end of `render(chat up to and
with it)`: what the model is given and what it has to say from there, with the template as the only judge. Token ids are
not searched for anything. Some templates write a turn differently once others follow (Qwen3 and DeepSeek-R1 leave the
thinking of earlier turns out). The turns of such a conversation do not lie in one text; it then becomes several
examples, each of them as the model sees it when it speaks, and each turn is learned in exactly one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llorch.files.tokenizer.chat import Message, TemplateSettings
from llorch.files.tokenizer.conversation import Conversation
from llorch.files.tokenizer.messages import unwritten_call, unwritten_keys
from llorch.files.tokenizer.tokenizer import require_rows
from llorch.model.model import OpenModel
from llorch.runtime.errors import FormatError
from llorch.training.batch import IGNORED, Example
from llorch.training.data.formats import Chat, Instruction, LearnedTokens, Parsed, PromptCompletion, Text
from llorch.training.data.read import Record
from llorch.training.settings import DataSettings

Learned = list[tuple[int, bool]]  # a token, and whether it is learned


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: Sequence[tuple[int, int]]  # first character of every learned part, and the one behind it
    inert: Sequence[int]  # places that no control token may run over
    n_messages: int  # that the text has, from the first on


class Encoder:
    """Encodes rows for one model."""

    def __init__(self, model: OpenModel, settings: DataSettings) -> None:
        """Prepare; the model's vocabulary and its chat template are read when they are first needed."""
        self.counts: Counter[str] = Counter()  # how often something worth telling was done, by its description
        self._model = model
        self._settings = settings

    def encode(self, row: Parsed, record: Record) -> Iterator[Example]:
        """Yield the examples of one row: several for some conversations, none when nothing that is learned fits.

        FormatError, with file and line, where the row cannot be used or nothing of it is learned.
        """
        try:
            texts = list(self._learned(row))
            for tokens in texts:
                require_rows((token_id for token_id, _ in tokens), self._model.config.vocab_size, path=record.where)
        except FormatError as error:
            raise FormatError(error.code, error.message, path=record.where) from None
        except ValueError as error:  # of the tokenizer
            raise FormatError("Malformed", str(error), path=record.where) from None
        if len(texts) > 1:
            self.counts["conversations that became several examples, because the template changes earlier turns"] += 1
        examples = [_example(tokens, record.source) for tokens in texts]
        if not any(example.n_trained for example in examples):
            message = "expected a learned token (an assistant turn with text, or a label), got none"
            raise FormatError("Missing", message, path=record.where)
        yield from filter(None, map(self._cut, examples))

    def _learned(self, row: Parsed) -> Iterator[Learned]:
        """Yield the token sequences of a row, whatever its format, with the part that is trained."""
        match row:
            case Text():
                yield self._plain(row.text, 0)
            case PromptCompletion():
                start = 0 if self._settings.train_on == "all" else len(row.prompt)
                yield self._plain(row.prompt + row.completion, start)
            case Instruction():
                yield from self._learned(row.chat if self._model.chat_templates else self._without_template(row))
            case Chat():
                yield from self._chat(row)
            case LearnedTokens():
                yield self._ready(row)

    def _plain(self, text: str, start: int) -> Learned:
        """Encode text that is learned from `start` on, with the end token."""
        tokenizer = self._model.tokenizer
        ids, starts = tokenizer.encode_spans(text, parse_special=self._settings.parse_special)
        if not self._settings.parse_special and self._model.chats.breaker.found_in(text):
            self.counts["texts that spell a control token, encoded as plain text (see parse_special)"] += 1
        if ids[:2] == [tokenizer.bos_token_id] * 2:
            ids, starts = ids[1:], starts[1:]
        if ids[-1:] == [] or ids[-1] not in tokenizer.eos_token_ids:
            ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            ids, starts = ids + ends, starts + [len(text)] * len(ends)
        self._count_straddling(starts, [start])
        return [(one, place >= start) for one, place in zip(ids, starts, strict=True)]

    def _without_template(self, row: Instruction) -> PromptCompletion:
        """Return the Alpaca form of a row for a model without a chat template, and count it."""
        if row.plain is None:
            message = "expected a model with a chat template for a row with a system text or a history, got none"
            raise FormatError("Missing", f"{message}; write rows of prompt and completion")
        self.counts["rows written with the prompt of the Alpaca data set, because the model has no chat template"] += 1
        return row.plain

    def _chat(self, chat: Chat) -> Iterator[Learned]:
        """Yield the token sequences of a conversation, several if the template rewrites earlier turns."""
        settings = self._settings.template
        settings = replace(settings, variables={**(settings.variables or {}), **chat.variables})
        conversation = self._model.chats.conversation(chat.messages, chat.tools, settings)
        whole = self._settings.train_on == "all"
        learned = chat.learned[-1:] if self._settings.train_on == "last" else chat.learned
        found = [render_all(conversation, len(chat.messages))] if whole else render_turns(learned, conversation)
        self._judge_written(chat, settings, found)
        for rendered in found:
            yield self._rendered(rendered, ends_turns=not whole)

    def _judge_written(self, chat: Chat, settings: TemplateSettings, found: Sequence[Rendered]) -> None:
        """Refuse tool calls that the chat template does not write, and count what else it leaves out."""
        if not found:
            return
        counts, given = [one.n_messages for one in reversed(found)], [one.text for one in reversed(found)]

        def texts(messages: Sequence[Message], tools: Sequence[object] | None) -> Iterator[str]:
            conversation = self._model.chats.conversation(messages, tools, settings)
            return (conversation.text(count)[0] for count in counts)

        asked = chat.messages[: counts[0]], chat.tools, texts, given
        if call := unwritten_call(*asked):
            message = "expected a chat template that writes tool calls, got one that drops them"
            remedy = "use another template, or write the call into the content of the turn"
            raise FormatError("Unsupported", f"messages{call}: {message}; {remedy}")
        self.counts.update(f"rows in which the chat template does not write {key}" for key in {*unwritten_keys(*asked)})

    def _rendered(self, rendered: Rendered, *, ends_turns: bool) -> Learned:
        """Encode a rendered conversation; its spans are learned, with their end tokens if `ends_turns`."""
        ids, starts = self._model.tokenizer.encode_rendered(rendered.text, inert=rendered.inert)
        learned = [False] * len(ids)
        for first, last in rendered.spans:
            begin, end = bisect_left(starts, first), bisect_left(starts, last)
            if ends_turns:
                end = self._end_of_turn(rendered.text[:last], ids, starts, begin, end)
            learned[begin:end] = [True] * (end - begin)
        self._count_straddling(starts, [first for first, _ in rendered.spans])
        return list(zip(ids, learned, strict=True))

    def _end_of_turn(self, text: str, ids: list[int], starts: list[int], begin: int, end: int) -> int:
        """Return the place after the end-of-turn token if only white space follows that token; else `end`."""
        last = end
        while last > begin and ids[last - 1] not in self._model.tokenizer.eos_token_ids:
            last -= 1
        if last > begin and not (text[starts[last] :] if last < len(starts) else "").strip():
            return last
        self.counts[
            "turns that the chat template ends without an end-of-turn token: the model will not learn to stop"
        ] += 1
        return end

    def _ready(self, row: LearnedTokens) -> Learned:
        """Take the ids of a row as they are; all are learned unless it has labels."""
        size = self._model.config.vocab_size
        for place, one in enumerate(row.ids):
            if not 0 <= one < size:
                message = f"input_ids[{place}]: expected an id from 0 to {size - 1}, got {one}"
                raise FormatError("OutOfRange", message)
        labels = row.ids if row.labels is None else row.labels
        return [(one, label != IGNORED) for one, label in zip(row.ids, labels, strict=True)]

    def _cut(self, example: Example) -> Example | None:
        """Cut an example to `max_length` and count it; None if nothing learned is left."""
        room = self._settings.max_length
        if len(example.ids) <= room:
            return example
        cut = Example(example.ids[:room], example.labels[:room], example.source)
        if not cut.n_trained:
            self.counts[f"examples left out, because none of their first {room} tokens is learned"] += 1
            return None
        self.counts[f"examples cut to {room} tokens"] += 1
        return cut

    def _count_straddling(self, starts: Sequence[int], firsts: Sequence[int]) -> None:
        for first in firsts:
            place = bisect_left(starts, first)
            if 0 < place < len(starts) and starts[place] > first:
                self.counts["tokens that are not learned, because they start before the learned text"] += 1


def _example(tokens: Learned, source: str) -> Example:
    labels = tuple(one if learned else IGNORED for one, learned in tokens)
    return Example(tuple(one for one, _ in tokens), labels, source)


def render_all(conversation: Conversation, n_messages: int) -> Rendered:
    """Render a conversation of which every token is learned."""
    text, inert = conversation.text(n_messages)
    return Rendered(text, [(0, len(text))], inert, n_messages)


def render_turns(learned: Sequence[int], conversation: Conversation) -> list[Rendered]:
    """Render a conversation so that every learned turn (by place) stands as the model would say it.

    One text, or several when the template writes earlier turns differently; the last one has the last turn. FormatError
    where the template refuses the conversation, or does not open turns as it writes them.
    """
    turns = [_turn(conversation, place) for place in learned]
    places = {text: place for (text, _, _), place in zip(turns, learned, strict=True)}
    found: list[Rendered] = []
    while turns:
        text, _, inert = turns[-1]
        inside = [turn for turn in turns if text.startswith(turn[0])]
        found.append(Rendered(text, [(start, len(part)) for part, start, _ in inside], inert, places[text] + 1))
        turns = [turn for turn in turns if not text.startswith(turn[0])]
    return found[::-1]


def _turn(conversation: Conversation, place: int) -> tuple[str, int, list[int]]:
    """Return the conversation up to and with a turn of the assistant, the turn's start in it, and the inert places."""
    before, _ = conversation.text(place, opened=True)
    text, inert = conversation.text(place + 1)
    if not text.startswith(before):
        common = next(i for i, c in enumerate(before) if i >= len(text) or text[i] != c)
        turn = f"the assistant's turn at messages[{place}] and the generation prompt start differently"
        actual = f"expected {before[common:][:40]!r}, got {text[common:][:40]!r}"
        remedy = "use a template that writes both equally, or rows of prompt and completion"
        raise FormatError("Unsupported", f"chat template: {turn}: {actual}; {remedy}")
    return text, len(before), inert
