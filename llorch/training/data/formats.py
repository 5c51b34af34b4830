"""Parse rows of data in several formats, which are recognised by their keys.

The first of these formats whose keys a row has is used (the Alpaca data set also has a `text`): token ids, messages,
ShareGPT, Alpaca, prompt and completion, text. All rows of a file have one format.

Preference data and multimodal rows are refused. A row of preference data has a rejected answer or a score of an answer.
Training on it as on a good answer would teach the opposite.

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
    """Plain text with all tokens in the loss."""

    text: str


@dataclass(frozen=True)
class PromptCompletion:
    """Prompt and its completion."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Conversation."""

    messages: Sequence[Message]  # messages for a chat template
    tools: Sequence[object] | None  # functions that the assistant may call
    learned: Sequence[int]  # indices of the assistant turns that may be in the loss
    variables: Mapping[str, object] = field(default_factory=dict)  # chat template variables of this row


@dataclass(frozen=True)
class LearnedTokens:
    """Token ids and labels (`IGNORED` if masked); without labels, all tokens are in the loss."""

    ids: Sequence[int]
    labels: Sequence[int] | None


@dataclass(frozen=True)
class Instruction:
    """Instruction and its answer."""

    chat: Chat  # for models with a chat template
    plain: PromptCompletion | None  # for models without a chat template; None if it has a system text or a history


Parsed = Text | PromptCompletion | Chat | Instruction | LearnedTokens

_ALPACA = (  # prompts of the Alpaca data set, for models without a chat template
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
_KWARGS = "chat_template_kwargs"
_SPEAKERS = {  # `from` of ShareGPT -> role
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
    """Return the format of a row by its keys; FormatError Unsupported for none, and for a row unfit for training."""
    present = {key for key, value in record.values.items() if value is not None}
    format_name = next((name for name, (keys, _, _) in FORMATS.items() if present.issuperset(keys)), None)
    refuse_row(record, present, format_name)
    if format_name is not None:
        return format_name
    expected = "; ".join(", ".join(keys) for keys, _, _ in FORMATS.values())
    actual = ", ".join(sorted(present)) or "none"
    raise FormatError("Unsupported", f"keys of a row: expected one of: {expected}; got {actual}", path=record.where)


def parse(record: Record, name: str) -> Parsed:
    """Read a row of a known format."""
    _, _, read = FORMATS[name]
    return read(Fields(record.values, record.where))


def unused_keys(record: Record, name: str) -> set[str]:
    """Return the keys of a row that its format does not read."""
    keys, optional, _ = FORMATS[name]
    return {key for key, value in record.values.items() if value is not None} - {*keys, *optional}


def _parse_token_ids(fields: Fields) -> LearnedTokens:
    ids = _integers(fields, "input_ids")
    present = _unpadded_slice(fields, len(ids))
    if not fields.has("labels"):
        return LearnedTokens(ids[present], None)
    labels = _integers(fields, "labels", n_expected=len(ids))
    for index, (token_id, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token_id):
            raise fields.error("Inconsistent", f"labels[{index}]", f"{IGNORED} or the input id {token_id}", label)
    return LearnedTokens(ids[present], labels[present])


def _unpadded_slice(fields: Fields, count: int) -> slice:
    """Return the slice without padding, which may be at either end."""
    if not fields.has("attention_mask"):
        return slice(None)
    mask = _integers(fields, "attention_mask", n_expected=count)
    bad_index = next((index for index, bit in enumerate(mask) if bit not in (0, 1)), None)
    if bad_index is not None:
        raise fields.error("OutOfRange", f"attention_mask[{bad_index}]", "0 or 1", mask[bad_index])
    if 1 not in mask:
        raise fields.error("Missing", "attention_mask", "at least one 1, for a token that is not padding", mask)
    first, last = mask.index(1), count - mask[::-1].index(1)
    if 0 in mask[first:last]:
        hole = first + mask[first:last].index(0)
        expected = "1, because padding is allowed only before and after all tokens"
        raise fields.error("Unsupported", f"attention_mask[{hole}]", expected, 0)
    return slice(first, last)


def _integers(fields: Fields, key: str, *, n_expected: int | None = None) -> list[int]:
    value = fields.values.get(key)
    if not isinstance(value, list) or not value or not {type(number) for number in value} <= {int}:
        raise fields.error("Malformed", key, "a list of integers, at least one", value)
    if n_expected not in (None, len(value)):
        raise fields.error("Shape", key, f"{n_expected} entries like input_ids", len(value))
    return value


def _parse_share_gpt(fields: Fields) -> Chat:
    value = fields.values.get("conversations")
    if not isinstance(value, list):
        raise fields.error("Malformed", "conversations", "a list", value)
    turns = [_parse_share_gpt_turn(fields, f"conversations[{i}]", entry) for i, entry in enumerate(value)]
    if fields.has("system"):
        turns = [{"role": "system", "content": fields.text("system")}, *turns]
    return _read_chat(fields, "conversations", turns)


def _parse_share_gpt_turn(fields: Fields, name: str, entry: object) -> dict[str, object]:
    if not isinstance(entry, Mapping):
        raise fields.error("Malformed", name, "an object with from and value", entry)
    speaker, text = entry.get("from"), entry.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise fields.error("Unsupported", f"{name}.from", f"one of {', '.join(_SPEAKERS)}", speaker)
    if not isinstance(text, str):
        raise fields.error("Malformed", f"{name}.value", "a text", text)
    other_fields = {key: field_value for key, field_value in entry.items() if key not in ("from", "value")}
    turn: dict[str, object] = {**other_fields, "role": _SPEAKERS[speaker], "content": text}
    if speaker == "function_call":
        calls = parsed(text)
        call_list = calls if isinstance(calls, list) else [calls]
        turn["content"], turn["tool_calls"] = "", [tool_call(fields, f"{name}.value", call) for call in call_list]
    return turn


def _parse_alpaca(fields: Fields) -> Instruction:
    """Parse an Alpaca row as a conversation, and as plain text for models without a chat template."""
    system = fields.text("system", default="")
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    for user, assistant in _read_history(fields):
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    instruction, context, output = fields.text("instruction"), fields.text("input", default=""), fields.text("output")
    prompt = _ALPACA_WITH_INPUT.format(instruction, context) if context else _ALPACA.format(instruction)
    completion = None if turns else PromptCompletion(prompt, output)
    user = f"{instruction}\n{context}" if context else instruction
    turns += [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
    turn_indices = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    return Instruction(Chat(turns, None, turn_indices, _read_variables(fields)), completion)


def _read_history(fields: Fields) -> list[list[str]]:
    value = fields.values.get("history") or []
    if not isinstance(value, list):
        raise fields.error("Malformed", "history", "a list of pairs", value)
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise fields.error("Malformed", f"history[{index}]", "a list of two texts", pair)
    return value


def _parse_completion(fields: Fields) -> PromptCompletion | Chat:
    prompt, completion = fields.values.get("prompt"), fields.values.get("completion")
    if not isinstance(prompt, list):
        return PromptCompletion(fields.text("prompt"), fields.text("completion"))
    prompt_messages, _ = _read_messages(fields, "prompt", prompt)
    completion_messages, turn_indices = _read_messages(fields, "completion", completion)
    indices = [len(prompt_messages) + index for index in turn_indices]
    return Chat([*prompt_messages, *completion_messages], _read_tools(fields), indices, _read_variables(fields))


def _read_chat(fields: Fields, key: str, value: object) -> Chat:
    """Parse a conversation; `weight` and `train` are removed from its messages."""
    messages, turn_indices = _read_messages(fields, key, value)
    return Chat(messages, _read_tools(fields), turn_indices, _read_variables(fields))


def _read_messages(fields: Fields, key: str, value: object) -> tuple[list[dict[str, object]], list[int]]:
    """Check a list of messages; also return the indices of the turns that may be in the loss."""
    messages = checked_messages(fields, key, value)
    flags = [_pop_train_flags(fields, f"{key}[{i}]", message) for i, message in enumerate(messages)]
    return messages, [i for i, message in enumerate(messages) if message["role"] == "assistant" and flags[i]]


def _pop_train_flags(fields: Fields, name: str, message: dict[str, object]) -> bool:
    """Remove OpenAI's `weight` and axolotl's `train` and `training` from a turn; tell if it may be in the loss."""
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
    """Read the chat template variables of a row, an object or its JSON text."""
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
    """Read the tool descriptions of a row, a list or its JSON text."""
    value = fields.values.get("tools")
    tools = parsed(value) if isinstance(value, str) else value
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.error("Malformed", "tools", "a list of objects", value)
    return tools


# Name -> identifying keys, optional keys, parser; the first format with all its identifying keys is used.
FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Fields], Parsed]]] = {
    "token ids": (("input_ids",), ("labels", "attention_mask"), _parse_token_ids),
    "messages": (
        ("messages",),
        ("tools", _KWARGS),
        lambda row: _read_chat(row, "messages", row.values.get("messages")),
    ),
    "ShareGPT": (("conversations",), ("system", "tools", _KWARGS), _parse_share_gpt),
    "Alpaca": (("instruction", "output"), ("input", "system", "history", _KWARGS), _parse_alpaca),
    "prompt and completion": (("prompt", "completion"), ("tools", _KWARGS), _parse_completion),
    "text": (("text",), (), lambda row: Text(row.text("text"))),
}


_PAIRS = re.compile(r"(^|[_-])(chosen|rejected|preferred)([_-]|$)|^kto_tag$|^response_[jk]$|^completions$")
_SCORES = ("score", "scores", "reward", "rating")  # keys of a score of an answer
_OF_ANSWERS = ("messages", "ShareGPT", "Alpaca", "prompt and completion")  # formats whose rows have an answer
_WANTED = "rows with one good answer"


def refuse_row(record: Record, present: Collection[str], format_name: str | None) -> None:
    """Refuse a row whose keys (`present`: those with a value) or turns mark it as preference data or as multimodal."""
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
    if "label" in present and record.values["label"] in (0, 1):  # also false and true
        remedy = "keep only the good answers: jq -c 'select(.label) | del(.label)' data.jsonl > good.jsonl"
        actual = f"label {record.values['label']!r}"
        raise _error(record, f"a row of preference data (KTO): expected {_WANTED}; got {actual}; {remedy}")
    _refuse_scores(record, "", record.values)
    for key in ("messages", "conversations", "prompt", "completion"):
        value = record.values.get(key)
        for index, turn in enumerate(value if isinstance(value, list) else ()):
            if isinstance(turn, Mapping):
                _refuse_scores(record, f"{key}[{index}].", turn)


def _refuse_scores(record: Record, prefix: str, values: Mapping[str, object]) -> None:
    score = next((key for key in _SCORES if values.get(key) is not None), None)
    if score is not None:
        remedy = f"keep the good answers and remove {score} from them, or give a turn the weight 0"
        raise _error(record, f"{prefix}{score}: expected {_WANTED}; got a score, {values[score]!r:.60}; {remedy}")


def _error(record: Record, message: str) -> FormatError:
    return FormatError("Unsupported", message, path=record.where)
