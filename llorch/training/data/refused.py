"""Rows that no format may learn: judgements of answers, and what is no text.

A row of preference data holds an answer that somebody refused, or says how good an answer is. Learned as a plain
answer, it would teach the opposite.

Source: TRL dataset formats (preference, unpaired preference, stepwise supervision); LLaMA-Factory data/README.md
(ranking, kto_tag); axolotl docs rlhf.qmd; OpenAI preference fine-tuning (preferred_output).
"""

import re
from collections.abc import Collection, Mapping

from llorch.files.tokenizer.messages import MEDIA
from llorch.runtime.errors import FormatError
from llorch.training.data.read import Record

_PAIRS = re.compile(r"(^|[_-])(chosen|rejected|preferred)([_-]|$)|^kto_tag$|^response_[jk]$|^completions$")
_SCORES = ("score", "scores", "reward", "rating")
_OF_ANSWERS = ("messages", "ShareGPT", "Alpaca", "prompt and completion")  # formats whose rows hold an answer
_WANTED = "rows with one good answer"


def refuse_row(record: Record, present: Collection[str], format_name: str | None) -> None:
    """Refuse a row whose keys, those `present`, say that it is no answer to learn, or that it is not text alone."""
    pairs = sorted(filter(_PAIRS.search, present))
    if pairs:
        remedy = (
            "keep only the good answers, for example: jq -c '{prompt, completion: .chosen}' data.jsonl > good.jsonl"
        )
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
