"""Mistakes of checkpoints 15 to 20, in their order."""

from llorch.mistakes.training_adapter import ADAPTER
from llorch.mistakes.training_gradients import GRADIENTS
from llorch.mistakes.training_loss import LOSSES
from llorch.mistakes.training_mistake import TrainingMistake
from llorch.mistakes.training_optimizer import OPTIMIZER

__all__ = ["TRAINING", "TrainingMistake"]

TRAINING: tuple[TrainingMistake, ...] = (*ADAPTER, *LOSSES, *GRADIENTS, *OPTIMIZER)
