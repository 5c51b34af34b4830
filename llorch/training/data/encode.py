"""Encode rows to examples: token ids, and labels of the tokens in the loss.

A token is in the loss if its first character lies in a trained part of the text. A token that starts before this part
and extends into it is masked, because at inference it belongs to the prompt. BOS comes from the vocabulary for plain
text, from the template for conversations, and occurs once. Plain text and completions end with one EOS. In
conversations, the EOS of a turn is trained; template text after it is masked.

A turn starts at the end of `render(messages before it, with the generation prompt)` and ends at the end of
`render(messages including it)`. Turn boundaries come from the rendered text; only the EOS inside a turn is searched in
the ids. Some templates render a turn differently if others follow: Qwen3 and DeepSeek-R1 drop the thinking of earlier
turns. Such a conversation becomes several examples, each as the model sees it when it generates, and each turn is in
the loss of exactly one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llorch.files.tokenizer.chat import Message, TemplateSettings
from llorch.files.tokenizer.conversation import Conversation
from llorch.files.tokenizer.messages import unrendered_call, unrendered_keys
from llorch.files.tokenizer.tokenizer import require_rows
from llorch.model.model import OpenModel
from llorch.runtime.errors import FormatError
from llorch.training.batch import IGNORED, Example
from llorch.training.data.formats import Chat, Instruction, LearnedTokens, Parsed, PromptCompletion, Text
from llorch.training.data.read import Record
from llorch.training.settings import DataSettings

LabelledTokens = list[tuple[int, bool]]  # (token id, in the loss)


@dataclass(frozen=True)
class Rendered:
    """Conversation rendered as text."""

    text: str
    spans: Sequence[tuple[int, int]]  # (start, stop) of every trained part, in characters
    inert: Sequence[int]  # positions in user text that spells a control token: no control token may span them
    n_messages: int  # number of rendered messages, counted from the first


class Encoder:
    """Encoder of rows for one model."""

    def __init__(self, model: OpenModel, settings: DataSettings) -> None:
        """Store model and settings; vocabulary and chat template are read when first needed."""
        self.counts: Counter[str] = Counter()  # number of notable events, by description
        self._model = model
        self._settings = settings

    def encode(self, row: Parsed, record: Record) -> Iterator[Example]:
        """Yield the examples of one row: several for some conversations, none if `max_length` cuts all trained tokens.

        FormatError, with file and line, if the row cannot be used or none of its tokens is in the loss.
        """
        try:
            texts = list(self._label_tokens(row))
            for tokens in texts:
                require_rows((token_id for token_id, _ in tokens), self._model.config.vocab_size, path=record.where)
        except FormatError as error:
            raise FormatError(error.code, error.message, path=record.where) from None
        except ValueError as error:  # raised by the tokenizer
            raise FormatError("Malformed", str(error), path=record.where) from None
        if len(texts) > 1:
            self.counts["conversations that became several examples, because the template changes earlier turns"] += 1
        examples = [_example(tokens, record.source) for tokens in texts]
        if not any(example.n_trained for example in examples):
            message = "expected a learned token (an assistant turn with text, or a label), got none"
            raise FormatError("Missing", message, path=record.where)
        yield from filter(None, map(self._cut, examples))

    def _label_tokens(self, row: Parsed) -> Iterator[LabelledTokens]:
        """Yield the labelled token sequences of a row of any format."""
        match row:
            case Text():
                yield self._encode_text(row.text, 0)
            case PromptCompletion():
                start = 0 if self._settings.train_on == "all" else len(row.prompt)
                yield self._encode_text(row.prompt + row.completion, start)
            case Instruction():
                yield from self._label_tokens(row.chat if self._model.chat_templates else self._alpaca_prompt(row))
            case Chat():
                yield from self._encode_chat(row)
            case LearnedTokens():
                yield self._label_ids(row)

    def _encode_text(self, text: str, start: int) -> LabelledTokens:
        """Encode text with BOS and EOS; tokens from character `start` on are in the loss."""
        tokenizer = self._model.tokenizer
        ids, starts = tokenizer.encode_spans(text, parse_special=self._settings.parse_special)
        if not self._settings.parse_special and self._model.chats.breaker.found_in(text):
            self.counts["texts that spell a control token, encoded as plain text (see parse_special)"] += 1
        if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text itself starts with BOS
            ids, starts = ids[1:], starts[1:]
        if ids[-1:] == [] or ids[-1] not in tokenizer.eos_token_ids:
            ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            ids, starts = ids + ends, starts + [len(text)] * len(ends)
        self._count_straddling(starts, [start])
        return [(token_id, char >= start) for token_id, char in zip(ids, starts, strict=True)]

    def _alpaca_prompt(self, row: Instruction) -> PromptCompletion:
        """Return the Alpaca prompt of a row for a model without a chat template, and count it."""
        if row.plain is None:
            message = "expected a model with a chat template for a row with a system text or a history, got none"
            raise FormatError("Missing", f"{message}; write rows of prompt and completion")
        self.counts["rows written with the prompt of the Alpaca data set, because the model has no chat template"] += 1
        return row.plain

    def _encode_chat(self, chat: Chat) -> Iterator[LabelledTokens]:
        """Yield the labelled tokens of a conversation, in several sequences if the template changes earlier turns."""
        settings = self._settings.template
        settings = replace(settings, variables={**(settings.variables or {}), **chat.variables})
        conversation = self._model.chats.conversation(chat.messages, chat.tools, settings)
        is_all = self._settings.train_on == "all"
        turns = chat.learned[-1:] if self._settings.train_on == "last" else chat.learned
        texts = [render_all(conversation, len(chat.messages))] if is_all else render_turns(turns, conversation)
        self._check_template_output(chat, settings, texts)
        for rendered in texts:
            yield self._encode_rendered(rendered, ends_turns=not is_all)

    def _check_template_output(self, chat: Chat, settings: TemplateSettings, rendered: Sequence[Rendered]) -> None:
        """Refuse tool calls that the chat template does not write; count other content that it omits."""
        if not rendered:
            return
        counts, contents = [r.n_messages for r in reversed(rendered)], [r.text for r in reversed(rendered)]

        def texts(messages: Sequence[Message], tools: Sequence[object] | None) -> Iterator[str]:
            conversation = self._model.chats.conversation(messages, tools, settings)
            return (conversation.text(count)[0] for count in counts)

        args = chat.messages[: counts[0]], chat.tools, texts, contents
        if call := unrendered_call(*args):
            message = "expected a chat template that writes tool calls, got one that drops them"
            remedy = "use another template, or write the call into the content of the turn"
            raise FormatError("Unsupported", f"messages{call}: {message}; {remedy}")
        self.counts.update(f"rows in which the chat template does not write {key}" for key in {*unrendered_keys(*args)})

    def _encode_rendered(self, rendered: Rendered, *, ends_turns: bool) -> LabelledTokens:
        """Encode a rendered conversation; its spans are in the loss, with `ends_turns` only to the EOS of each turn."""
        ids, starts = self._model.tokenizer.encode_rendered(rendered.text, inert=rendered.inert)
        in_loss = [False] * len(ids)
        for start_char, stop_char in rendered.spans:
            begin, end = bisect_left(starts, start_char), bisect_left(starts, stop_char)
            if ends_turns:
                end = self._end_of_turn(rendered.text[:stop_char], ids, starts, begin, end)
            in_loss[begin:end] = [True] * (end - begin)
        self._count_straddling(starts, [start_char for start_char, _ in rendered.spans])
        return list(zip(ids, in_loss, strict=True))

    def _end_of_turn(self, text: str, ids: list[int], starts: list[int], begin: int, end: int) -> int:
        """Return the index after the last EOS of a turn if only white space follows in `text`; else count it, `end`."""
        after_eos = end
        while after_eos > begin and ids[after_eos - 1] not in self._model.tokenizer.eos_token_ids:
            after_eos -= 1
        if after_eos > begin and not (text[starts[after_eos] :] if after_eos < len(starts) else "").strip():
            return after_eos
        self.counts[
            "turns that the chat template ends without an end-of-turn token: the model will not learn to stop"
        ] += 1
        return end

    def _label_ids(self, row: LearnedTokens) -> LabelledTokens:
        """Label the token ids of a row; all are in the loss if the row has no labels."""
        n_ids = self._model.config.vocab_size
        for index, token_id in enumerate(row.ids):
            if not 0 <= token_id < n_ids:
                message = f"input_ids[{index}]: expected an id from 0 to {n_ids - 1}, got {token_id}"
                raise FormatError("OutOfRange", message)
        labels = row.ids if row.labels is None else row.labels
        return [(token_id, label != IGNORED) for token_id, label in zip(row.ids, labels, strict=True)]

    def _cut(self, example: Example) -> Example | None:
        """Cut an example to `max_length` and count it; None if no token in the loss remains."""
        max_length = self._settings.max_length
        if len(example.ids) <= max_length:
            return example
        cut = Example(example.ids[:max_length], example.labels[:max_length], example.source)
        if not cut.n_trained:
            self.counts[f"examples left out, because none of their first {max_length} tokens is learned"] += 1
            return None
        self.counts[f"examples cut to {max_length} tokens"] += 1
        return cut

    def _count_straddling(self, starts: Sequence[int], start_chars: Sequence[int]) -> None:
        """Count the trained parts, by first character, whose start lies inside a token, which is masked."""
        for start_char in start_chars:
            index = bisect_left(starts, start_char)
            if 0 < index < len(starts) and starts[index] > start_char:
                self.counts["tokens that are not learned, because they start before the learned text"] += 1


def _example(tokens: LabelledTokens, source: str) -> Example:
    labels = tuple(token_id if in_loss else IGNORED for token_id, in_loss in tokens)
    return Example(tuple(token_id for token_id, _ in tokens), labels, source)


def render_all(conversation: Conversation, n_messages: int) -> Rendered:
    """Render a conversation with all tokens in the loss."""
    text, inert = conversation.text(n_messages)
    return Rendered(text, [(0, len(text))], inert, n_messages)


def render_turns(turn_indices: Sequence[int], conversation: Conversation) -> list[Rendered]:
    """Render a conversation so that every trained turn (by index) is written as the model would generate it.

    Return one text, or several if the template changes earlier turns; the last one has the last turn. FormatError if
    the template refuses the conversation, or if its generation prompt does not match its turns.
    """
    turns = [_turn(conversation, index) for index in turn_indices]
    indices = {text: index for (text, _, _), index in zip(turns, turn_indices, strict=True)}
    texts: list[Rendered] = []
    while turns:
        text, _, inert = turns[-1]
        inside = [turn for turn in turns if text.startswith(turn[0])]
        texts.append(Rendered(text, [(start, len(part)) for part, start, _ in inside], inert, indices[text] + 1))
        turns = [turn for turn in turns if not text.startswith(turn[0])]
    return texts[::-1]


def _turn(conversation: Conversation, index: int) -> tuple[str, int, list[int]]:
    """Return the text up to and including an assistant turn, the turn's first character in it, and `Rendered.inert`."""
    prompt, _ = conversation.text(index, opened=True)
    text, inert = conversation.text(index + 1)
    if not text.startswith(prompt):
        common = next(i for i, c in enumerate(prompt) if i >= len(text) or text[i] != c)
        turn = f"the assistant's turn at messages[{index}] and the generation prompt start differently"
        actual = f"expected {prompt[common:][:40]!r}, got {text[common:][:40]!r}"
        remedy = "use a template that writes both equally, or rows of prompt and completion"
        raise FormatError("Unsupported", f"chat template: {turn}: {actual}; {remedy}")
    return text, len(prompt), inert
