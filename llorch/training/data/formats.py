"""What a row of data says, and the formats in which it says it, told apart by their keys.

Of the formats whose keys a row has, the first of this list counts (the Alpaca data set has a `text` beside its parts):
token ids, messages, ShareGPT, Alpaca, prompt and completion, text. All rows of a file have the same one.

No format may learn judgements of answers, and what is no text. A row of preference data holds an answer that somebody
refused, or says how good an answer is. Learned as a plain answer, it would teach the opposite.

Source: OpenAI fine-tuning format (`weight`: 0 keeps a turn from being learned) and preference fine-tuning
(preferred_output); axolotl docs conversation.qmd (`train` and `training`: false does) and rlhf.qmd; TRL dataset formats
(messages, prompt and completion, `chat_template_kwargs`, preference, unpaired preference, stepwise supervision);
LLaMA-Factory data/README.md (ShareGPT, Alpaca, ranking, kto_tag); tatsu-lab/stanford_alpaca README (its prompts).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llorch.files.tokenizer.chat import RESERVED
from llorch.files.tokenizer.messages import MEDIA, checked_messages, parsed, tool_call
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields
from llorch.training.batch import IGNORED
from llorch.training.data.read import Record

Message = Mapping[str, object]


@dataclass(frozen=True)
class Text:
    """Plain text, learned whole."""

    text: str


@dataclass(frozen=True)
class PromptCompletion:
    """A text and how it goes on."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: Sequence[Message]  # as a chat template takes them
    tools: Sequence[object] | None  # functions that the assistant may call
    learned: Sequence[int]  # places of the turns that may be learned, all of them turns of the assistant
    variables: Mapping[str, object] = field(default_factory=dict)  # of the chat template, for this row


@dataclass(frozen=True)
class LearnedTokens:
    """Token ids, and those that are learned (`IGNORED` elsewhere); all of them without labels."""

    ids: Sequence[int]
    labels: Sequence[int] | None


@dataclass(frozen=True)
class Instruction:
    """An instruction and its answer."""

    chat: Chat  # for models with a chat template
    plain: PromptCompletion | None  # for models without one; None when it cannot be said this way


Parsed = Text | PromptCompletion | Chat | Instruction | LearnedTokens

# Of the data set itself; for models without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
_KWARGS = "chat_template_kwargs"
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def format_of(record: Record) -> str:
    """Name the format that a row's keys fit; Unsupported for none, and for a row that must not be learned."""
    present = {key for key, value in record.values.items() if value is not None}
    found = next((name for name, (keys, _, _) in FORMATS.items() if present.issuperset(keys)), None)
    refuse_row(record, present, found)
    if found is not None:
        return found
    wanted = "; ".join(", ".join(keys) for keys, _, _ in FORMATS.values())
    actual = ", ".join(sorted(present)) or "none"
    raise FormatError("Unsupported", f"keys of a row: expected one of: {wanted}; got {actual}", path=record.where)


def parse(record: Record, name: str) -> Parsed:
    """Read a row of a known format."""
    _, _, read = FORMATS[name]
    return read(Fields(record.values, record.where))


def unused_keys(record: Record, name: str) -> set[str]:
    """Return the keys of a row that its format does not read."""
    keys, optional, _ = FORMATS[name]
    return {key for key, value in record.values.items() if value is not None} - {*keys, *optional}


def _learned_tokens(fields: Fields) -> LearnedTokens:
    ids = _integers(fields, "input_ids")
    present = _unpadded(fields, len(ids))
    if not fields.has("labels"):
        return LearnedTokens(ids[present], None)
    labels = _integers(fields, "labels", as_many=len(ids))
    for place, (token_id, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token_id):
            raise fields.error("Inconsistent", f"labels[{place}]", f"{IGNORED} or the input id {token_id}", label)
    return LearnedTokens(ids[present], labels[present])


def _unpadded(fields: Fields, count: int) -> slice:
    """Find the tokens that are no padding, which may stand at either end."""
    if not fields.has("attention_mask"):
        return slice(None)
    mask = _integers(fields, "attention_mask", as_many=count)
    strange = next((place for place, one in enumerate(mask) if one not in (0, 1)), None)
    if strange is not None:
        raise fields.error("OutOfRange", f"attention_mask[{strange}]", "0 or 1", mask[strange])
    if 1 not in mask:
        raise fields.error("Missing", "attention_mask", "at least one 1, for a token that is not padding", mask)
    first, last = mask.index(1), count - mask[::-1].index(1)
    if 0 in mask[first:last]:
        hole = first + mask[first:last].index(0)
        expected = "1, because padding is allowed only before and after all tokens"
        raise fields.error("Unsupported", f"attention_mask[{hole}]", expected, 0)
    return slice(first, last)


def _integers(fields: Fields, key: str, *, as_many: int | None = None) -> list[int]:
    value = fields.values.get(key)
    if not isinstance(value, list) or not value or not {type(one) for one in value} <= {int}:
        raise fields.error("Malformed", key, "a list of integers, at least one", value)
    if as_many not in (None, len(value)):
        raise fields.error("Shape", key, f"{as_many} entries like input_ids", len(value))
    return value


def _share_gpt(fields: Fields) -> Chat:
    value = fields.values.get("conversations")
    if not isinstance(value, list):
        raise fields.error("Malformed", "conversations", "a list", value)
    turns = [_share_gpt_turn(fields, f"conversations[{i}]", entry) for i, entry in enumerate(value)]
    if fields.has("system"):
        turns = [{"role": "system", "content": fields.text("system")}, *turns]
    return _read_chat(fields, "conversations", turns)


def _share_gpt_turn(fields: Fields, name: str, entry: object) -> dict[str, object]:
    if not isinstance(entry, Mapping):
        raise fields.error("Malformed", name, "an object with from and value", entry)
    speaker, text = entry.get("from"), entry.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise fields.error("Unsupported", f"{name}.from", f"one of {', '.join(_SPEAKERS)}", speaker)
    if not isinstance(text, str):
        raise fields.error("Malformed", f"{name}.value", "a text", text)
    rest = {key: own for key, own in entry.items() if key not in ("from", "value")}
    turn: dict[str, object] = {**rest, "role": _SPEAKERS[speaker], "content": text}
    if speaker == "function_call":
        calls = parsed(text)
        listed = calls if isinstance(calls, list) else [calls]
        turn["content"], turn["tool_calls"] = "", [tool_call(fields, f"{name}.value", call) for call in listed]
    return turn


def _alpaca(fields: Fields) -> Instruction:
    """Read an Alpaca row as a conversation, and as plain text for models without a template."""
    system = fields.text("system", default="")
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    for user, assistant in _history(fields):
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    asked, given, output = fields.text("instruction"), fields.text("input", default=""), fields.text("output")
    prompt = _ALPACA_WITH_INPUT.format(asked, given) if given else _ALPACA.format(asked)
    plain = None if turns else PromptCompletion(prompt, output)
    user = f"{asked}\n{given}" if given else asked
    turns += [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
    learned = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    return Instruction(Chat(turns, None, learned, _read_variables(fields)), plain)


def _history(fields: Fields) -> list[list[str]]:
    value = fields.values.get("history") or []
    if not isinstance(value, list):
        raise fields.error("Malformed", "history", "a list of pairs", value)
    for place, pair in enumerate(value):
        if not isinstance(pair, list) or [type(one) for one in pair] != [str, str]:
            raise fields.error("Malformed", f"history[{place}]", "a list of two texts", pair)
    return value


def _completion(fields: Fields) -> PromptCompletion | Chat:
    prompt, completion = fields.values.get("prompt"), fields.values.get("completion")
    if not isinstance(prompt, list):
        return PromptCompletion(fields.text("prompt"), fields.text("completion"))
    before, _ = _read_messages(fields, "prompt", prompt)
    after, learned = _read_messages(fields, "completion", completion)
    places = [len(before) + place for place in learned]
    return Chat([*before, *after], _read_tools(fields), places, _read_variables(fields))


def _read_chat(fields: Fields, key: str, value: object) -> Chat:
    """Check a conversation; `weight` and `train` are no part of its messages any more."""
    messages, learned = _read_messages(fields, key, value)
    return Chat(messages, _read_tools(fields), learned, _read_variables(fields))


def _read_messages(fields: Fields, key: str, value: object) -> tuple[list[dict[str, object]], list[int]]:
    """Check a list of messages; also returned are the places of the turns that may be learned."""
    messages = checked_messages(fields, key, value)
    wanted = [_is_wanted(fields, f"{key}[{place}]", message) for place, message in enumerate(messages)]
    return messages, [place for place, one in enumerate(messages) if one["role"] == "assistant" and wanted[place]]


def _is_wanted(fields: Fields, name: str, message: dict[str, object]) -> bool:
    """Take the keys that say whether to learn a turn out of it; OpenAI has a weight, axolotl the other two."""
    weight = message.pop("weight", None)
    if weight not in (None, 0, 1):
        raise fields.error("OutOfRange", f"{name}.weight", "0 or 1", weight)
    flags = {key: message.pop(key, None) for key in ("train", "training")}
    for key, flag in flags.items():
        if not isinstance(flag, bool | None):
            raise fields.error("Malformed", f"{name}.{key}", "true or false", flag)
        if flag and message["role"] != "assistant":
            expected = "false, because llorch trains turns of the assistant, or with train_on=all every token"
            raise fields.error("Unsupported", f"{name}.{key}", expected, flag)
    for key in ("train_detail", "training_detail"):
        if message.get(key):
            expected = "no such key, because llorch trains whole turns"
            raise fields.error("Unsupported", f"{name}.{key}", expected, message[key])
    return weight != 0 and False not in flags.values()


def _read_variables(fields: Fields) -> Mapping[str, object]:
    """Check the variables of the chat template that a row brings, an object or the JSON text of one."""
    value = fields.values.get(_KWARGS)
    variables = parsed(value) if isinstance(value, str) else value
    if variables in (None, ""):
        return {}
    if not isinstance(variables, dict):
        raise fields.error("Malformed", _KWARGS, "an object", value)
    reserved = [name for name in variables if name in RESERVED]
    if reserved:
        raise fields.error("Unsupported", _KWARGS, f"other names than {', '.join(RESERVED)}", reserved[0])
    return variables


def _read_tools(fields: Fields) -> list[object] | None:
    """Check the descriptions of tools, a list or the JSON text of one."""
    value = fields.values.get("tools")
    tools = parsed(value) if isinstance(value, str) else value
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.error("Malformed", "tools", "a list of objects", value)
    return tools


# Name: the keys that tell it, further keys that it reads, how it is read.
FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Fields], Parsed]]] = {
    "token ids": (("input_ids",), ("labels", "attention_mask"), _learned_tokens),
    "messages": (
        ("messages",),
        ("tools", _KWARGS),
        lambda row: _read_chat(row, "messages", row.values.get("messages")),
    ),
    "ShareGPT": (("conversations",), ("system", "tools", _KWARGS), _share_gpt),
    "Alpaca": (("instruction", "output"), ("input", "system", "history", _KWARGS), _alpaca),
    "prompt and completion": (("prompt", "completion"), ("tools", _KWARGS), _completion),
    "text": (("text",), (), lambda row: Text(row.text("text"))),
}


_PAIRS = re.compile(r"(^|[_-])(chosen|rejected|preferred)([_-]|$)|^kto_tag$|^response_[jk]$|^completions$")
_SCORES = ("score", "scores", "reward", "rating")
_OF_ANSWERS = ("messages", "ShareGPT", "Alpaca", "prompt and completion")  # formats whose rows hold an answer
_WANTED = "rows with one good answer"


def refuse_row(record: Record, present: Collection[str], format_name: str | None) -> None:
    """Refuse a row whose keys, those `present`, say that it is no answer to learn, or that it is not text alone."""
    pairs = sorted(filter(_PAIRS.search, present))
    if pairs:
        example = "for example: jq -c '{prompt, completion: .chosen}' data.jsonl > good.jsonl"
        remedy = f"keep only the good answers, {example}"
        raise _error(record, f"a row of preference data: expected {_WANTED}; got {', '.join(pairs)}; {remedy}")
    media = [key for key in MEDIA if key in present and record.values[key] not in ("", [])]
    if media:
        raise _error(record, f"{media[0]}: expected a row with text only, got a row with {media[0]}; remove such rows")
    if format_name not in _OF_ANSWERS:
        return
    if "label" in present and record.values["label"] in (0, 1):  # false and true, too
        remedy = "keep only the good answers: jq -c 'select(.label) | del(.label)' data.jsonl > good.jsonl"
        actual = f"label {record.values['label']!r}"
        raise _error(record, f"a row of preference data (KTO): expected {_WANTED}; got {actual}; {remedy}")
    _refuse_scores(record, "", record.values)
    for key in ("messages", "conversations", "prompt", "completion"):
        value = record.values.get(key)
        for place, turn in enumerate(value if isinstance(value, list) else ()):
            if isinstance(turn, Mapping):
                _refuse_scores(record, f"{key}[{place}].", turn)


def _refuse_scores(record: Record, where: str, values: Mapping[str, object]) -> None:
    found = next((key for key in _SCORES if values.get(key) is not None), None)
    if found is not None:
        remedy = f"keep the good answers and remove {found} from them, or give a turn the weight 0"
        raise _error(record, f"{where}{found}: expected {_WANTED}; got a score, {values[found]!r:.60}; {remedy}")


def _error(record: Record, message: str) -> FormatError:
    return FormatError("Unsupported", message, path=record.where)
