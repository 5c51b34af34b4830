"""The change that an adapter makes on data that it was not trained on."""

import math
from dataclasses import dataclass
from pathlib import Path

from llorch.files import open_weights
from llorch.files.hub import find
from llorch.lora.files import adapter_for
from llorch.model.model import OpenModel
from llorch.pytorch.device import target
from llorch.pytorch.lora.adapters import activate, attach
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.step import Alone, mean_loss
from llorch.runtime.builtin import find_data
from llorch.runtime.errors import FormatError
from llorch.training.data import PackedRows, TrainingData, batches, read_data
from llorch.training.settings import TrainSettings


@dataclass(frozen=True)
class Judgement:
    """Losses of the base alone and with an adapter."""

    base: str  # what is known of the base that the adapter was trained on
    split: str
    n_rows: int
    n_trained: int  # tokens that the loss is the mean over
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

    `adapter` is a PEFT directory or a LoRA GGUF file; `split` is `train`, `valid` or `test`, None the last one that
    there is.
    """
    weights = open_weights(find(settings.model))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    read, base = adapter_for(weights, adapter, any_base=any_base)
    data = read_data(find_data(settings.data), OpenModel(weights), settings.data_settings)
    split, rows = _rows(data, split, settings.data)
    at = target(settings.device, settings.dtype_name)
    n_tokens = data.settings.max_length
    module = load_for_training(weights, at, residency=settings.weights, batch=settings.batch_size, n_tokens=n_tokens)
    attach(module, read)
    made = list(batches(rows, settings.batch_size))
    with_adapter = mean_loss(Alone(module), made, at.device, chunk=settings.chunk or None)
    activate(module, None)
    without = mean_loss(Alone(module), made, at.device, chunk=settings.chunk or None)
    assert with_adapter is not None
    assert without is not None
    return Judgement(base, split, len(rows), sum(batch.n_trained for batch in made), without, with_adapter)


def _rows(data: TrainingData, split: str | None, name: str) -> tuple[str, PackedRows]:
    """Return the name of a split and its rows; None picks the last split that has rows, of train, valid, test."""
    splits = {name: examples for name in ("train", "valid", "test") if len(examples := getattr(data, name))}
    chosen = split or list(splits)[-1]
    if chosen not in splits:
        raise FormatError("Missing", f"data: expected one of the splits {', '.join(splits)}, got {split}", path=name)
    return chosen, data.rows(splits[chosen])
