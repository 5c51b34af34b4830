"""Mistakes of checkpoints 15 to 20, in their order."""

from typing import Any

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.training_adapter import ADAPTER
from llorch.diagnosis.mistakes.training_families import OF_FAMILIES
from llorch.diagnosis.mistakes.training_gradients import GRADIENTS
from llorch.diagnosis.mistakes.training_loss import LOSSES
from llorch.diagnosis.mistakes.training_optimizer import OPTIMIZER

__all__ = ["TRAINING"]

TRAINING: tuple[Mistake[Any], ...] = (*ADAPTER, *LOSSES, *GRADIENTS, *OF_FAMILIES, *OPTIMIZER)
