"""What an adapter changes on data that it was not trained on."""

import math
from dataclasses import dataclass
from pathlib import Path

from llorch.builtin import find_data
from llorch.errors import FormatError
from llorch.files import open_weights
from llorch.lora.files import check_base, read_adapter
from llorch.model import Opened, find
from llorch.pytorch.device import target
from llorch.pytorch.lora.adapters import activate, attach
from llorch.pytorch.train.evaluation import mean_loss
from llorch.pytorch.train.loading import load_for_training
from llorch.train.data import Rows, TrainingData, batches, read_data
from llorch.train.settings import TrainSettings


@dataclass(frozen=True)
class Judgement:
    """Losses with and without an adapter.

    Attributes:
        base: What is known of the base that the adapter was trained on.
        split: Which part of the data.
        n_rows: Rows.
        n_trained: Tokens that the loss is the mean over.
        without: Loss of the base alone.
        with_adapter: Loss with the adapter.
    """

    base: str
    split: str
    n_rows: int
    n_trained: int
    without: float
    with_adapter: float

    @property
    def perplexities(self) -> tuple[float, float]:
        """exp(loss), without and with the adapter."""
        return math.exp(self.without), math.exp(self.with_adapter)


def judge_adapter(
    settings: TrainSettings, adapter: str | Path, *, split: str | None, any_base: bool = False
) -> Judgement:
    """Compute the loss of a model on data, with and without an adapter.

    Args:
        settings: Model, data, how it is read, and where and in which batches it runs.
        adapter: A PEFT directory or a LoRA GGUF file.
        split: `train`, `valid` or `test`; None takes the last one that there is.
        any_base: Accept an adapter that was made for another base.

    Returns:
        Both losses.

    Raises:
        FileNotFoundError: There is no such model, data or adapter.
        FormatError: One of them cannot be used, or the data has no such split.
    """
    weights = open_weights(find(settings.model))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    base = check_base(adapter, weights, any_base=any_base)
    read = read_adapter(adapter, config)
    data = read_data(find_data(settings.data), Opened(weights), settings.data_settings)
    split, rows = _rows(data, split, settings.data)
    at = target(settings.device, settings.dtype_name)
    n_tokens = data.settings.max_length
    module = load_for_training(weights, at, residency=settings.weights, batch=settings.batch_size, n_tokens=n_tokens)
    attach(module, read)
    made = list(batches(rows, settings.batch_size))
    with_adapter = mean_loss(module, made, at.device, chunk=settings.chunk or None)
    activate(module, None)
    without = mean_loss(module, made, at.device, chunk=settings.chunk or None)
    assert with_adapter is not None
    assert without is not None
    return Judgement(base, split, len(rows), sum(batch.n_trained for batch in made), without, with_adapter)


def _rows(data: TrainingData, split: str | None, name: str) -> tuple[str, Rows]:
    """The rows of a split, and its name."""
    splits = {name: examples for name in ("train", "valid", "test") if len(examples := getattr(data, name))}
    chosen = split or list(splits)[-1]
    if chosen not in splits:
        raise FormatError("Missing", f"data: expected one of the splits {', '.join(splits)}, got {split}", path=name)
    return chosen, data.rows(splits[chosen])
