"""What the record of a llorch run tells of its data: whether the model learned to stop, and whether the data changed.

Source: unsloth issue 416, trl issues 1623 and 734 (end token masked or never appended: the model never stops).
"""

from pathlib import Path

from llorch.builtin import find_data
from llorch.errors import FormatError
from llorch.files import Weights
from llorch.files.strict_json import read_json
from llorch.lora.finding import NOT_RUN, OK, WARNING, WRONG, Finding
from llorch.model import Opened
from llorch.train.data import TrainingData, read_data
from llorch.train.settings_file import settings_from

_RUN, _LIMIT = "run.json", 1 << 20


def check_run(adapter: Path, weights: Weights) -> list[Finding]:
    """Look at the data that an adapter was trained on, if it lies in the folder of its run."""
    record = adapter / _RUN
    if not record.is_file():
        return [Finding("end token", NOT_RUN, "the adapter does not lie in the folder of a llorch run")]
    try:
        values = read_json(record, limit=_LIMIT)
        data = _data(values, weights)
    except (FormatError, FileNotFoundError, ValueError) as error:
        return [Finding("end token", NOT_RUN, f"the data of the run cannot be read: {error}")]
    return [_end_token(data, Opened(weights)), _unchanged(data, values)]


def _data(values: dict, weights: Weights) -> TrainingData:
    settings = settings_from((_RUN, values.get("settings", {})))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    return read_data(find_data(settings.data), Opened(weights), settings.data_settings)


def _end_token(data: TrainingData, model: Opened) -> Finding:
    ends = model.tokenizer.eos_token_ids
    n_ending = sum(any(label in ends for label in example.labels) for example in data.train)
    text = f"{n_ending} of {len(data.train)} examples train a token that ends a text"
    if n_ending:
        return Finding("end token", OK, text)
    return Finding("end token", WRONG, f"{text}: the model never learned to stop (is padding = end token masked?)")


def _unchanged(data: TrainingData, values: dict) -> Finding:
    identity = values.get("identity")
    recorded = identity.get("data") if isinstance(identity, dict) else None
    if recorded == data.digest:
        return Finding("training data", OK, "as it was when the run began")
    return Finding("training data", WARNING, "not what it was when the run began: what is said of it may be wrong")
