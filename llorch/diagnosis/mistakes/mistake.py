"""Known mistake: a wrong variant of one or more stages, with a name and a sentence for the person who made it.

The right op and the wrong variant read the same inputs, so a result that equals the wrong variant's names its mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from llorch.config import ModelConfig
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.stages import BY_NAME
from llorch.verify.training.stages import TRAINING_STAGES

Inputs = TypeVar("Inputs")
Wrong = Callable[[StageInputs, str], np.ndarray]  # of a stage of the table
AFTER_LOGITS = {"selected_logits": "09", "argmax": "10", "probabilities": "11", "generation": "12"}  # -> checkpoint
IN_TRAINING = {stage.name: stage.checkpoint for stage in TRAINING_STAGES}
IN_PRODUCTS = {"decode": "13", "rounding": "13", "product": "13"}  # what a quantised product consists of


def every_model(config: ModelConfig) -> bool:
    """Return True: the mistake can be made with any configuration."""
    return True


def every_layer(config: ModelConfig, layer: int) -> bool:
    """Return True: the mistake can be made in any layer."""
    return True


@dataclass(frozen=True, kw_only=True)
class Mistake(Generic[Inputs]):
    """One known mistake."""

    name: str  # kebab-case, unique
    stages: tuple[str, ...]  # where it strikes: of the table, one of `AFTER_LOGITS`, or some of `IN_PRODUCTS`
    diagnosis: str  # what was done and what is right, in one sentence
    # makes the wrong array from the inputs of the right op and the name of the stage
    wrong: Callable[[Inputs, str], np.ndarray]
    also: tuple[Callable[[Inputs, str], np.ndarray], ...] = ()  # other code with this mistake that differs at an edge
    reads: tuple[str, ...] = ()  # stages beside the inputs of the right op
    # inputs that show it: `near`, `far`, `long` (more tokens than a layer sees, which no golden has), names in
    # `SAMPLINGS`, types of a matrix, or a case of its checkpoint
    cases: tuple[str, ...] = ("near", "far")
    rounds: bool = False  # it rounds to few bits: what is left of it are values on the edge between two of them
    after_cached: bool = False  # it shows only in a pass that continues a cache
    applies_to: Callable[[ModelConfig], bool] = every_model  # whether it can be made with a configuration
    in_layers: Callable[[ModelConfig, int], bool] = every_layer  # in which layers

    def first_layer(self, stage: str, config: ModelConfig) -> int | None:
        """Return the first layer of a model in which the mistake changes a stage; None if the stage is in no layer."""
        if not BY_NAME[stage].in_layer:
            return None
        layers = range(config.n_layers)
        return next(i for i in layers if BY_NAME[stage].applies_to(config, i) and self.in_layers(config, i))

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Numbers of the checkpoints that its stages belong to, the first stage's first."""
        return tuple(dict.fromkeys(checkpoint_of(stage) for stage in self.stages))


def checkpoint_of(stage: str) -> str:
    """Return the checkpoint number of a stage, or of a step after the logits, of a product or of training."""
    steps = AFTER_LOGITS | IN_PRODUCTS | IN_TRAINING
    return steps[stage] if stage in steps else BY_NAME[stage].checkpoint
