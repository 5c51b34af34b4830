"""Known mistake: a right function, the wrong one that people write instead of it, a name and a sentence.

The right and the wrong function read the same inputs, so a result that equals the wrong function's names its mistake.
A step of training is a chain in which one wrong line moves every later number, so a mistake of training is put into the
running code in the place of a function of llorch, and the checkpoint of `stages` goes red first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from llorch.diagnosis.mistakes.in_stage import IN_STAGE
from llorch.diagnosis.mistakes.planting import Replacement, replaced_all
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig
from llorch.stages.table import BY_NAME
from llorch.stages.training import TRAINING_STAGES

Inputs = TypeVar("Inputs")
Wrong = Callable[[StageInputs, str], np.ndarray]  # of a stage of the table
AFTER_LOGITS = {"selected_logits": "09", "argmax": "10", "probabilities": "11", "generation": "12"}  # -> checkpoint
IN_TRAINING = {stage.name: stage.checkpoint for stage in TRAINING_STAGES}
IN_PRODUCTS = {"decode": "13", "rounding": "13", "product": "13"}  # what a quantised product consists of
ONE_STEP = ("plain",)  # the runs of training that show most of its mistakes


@dataclass(frozen=True, kw_only=True)
class Mistake(Generic[Inputs]):
    """One known mistake: the wrong function that people write in the place of a right one.

    Attributes:
        name: Kebab-case, unique.
        stages: Stages that it makes wrong, the first where it shows first: of the table, of training, one of
            `AFTER_LOGITS`, or some of `IN_PRODUCTS`.
        diagnosis: The mistake and the right way, in one sentence.
        part: The function that it takes the place of: one that a lesson has learners write (`rms_norm`), or one of
            llorch (`llorch.training.adamw.moved`). Empty: the whole computation of a stage.
        wrong: Makes the wrong function from the right one; without a part, makes the wrong array from the inputs of
            a stage and its name.
        also: Other ways to make the array, of code with this mistake that differs at an edge.
        along: Second function of llorch that mostly goes wrong too, and its replacement: gradients, which others
            derive from the forward pass, and the other use of a setting.
        reads: Stages that it reads in addition to the inputs of the right stage.
        cases: Inputs that show it: `near`, `far`, `long` (more tokens than a layer sees, which no golden has), names
            in `SAMPLINGS`, types of a matrix, a case of its checkpoint, or runs of training.
        rounds: It rounds to few bits; values on the edge between two of them are left over.
        after_cached: It shows only in a pass that continues a cache.
        applies_to: Tells if it can be made with a configuration.
        in_layers: Tells if it can be made in a layer.
    """

    name: str
    stages: tuple[str, ...]
    diagnosis: str
    wrong: Callable[..., Any]
    part: str = ""
    also: tuple[Callable[[Inputs, str], np.ndarray], ...] = ()
    along: tuple[str, Replacement] | None = None
    reads: tuple[str, ...] = ()
    cases: tuple[str, ...] = ("near", "far")
    rounds: bool = False
    after_cached: bool = False
    applies_to: Callable[[ModelConfig], bool] = lambda config: True
    in_layers: Callable[[ModelConfig, int], bool] = lambda config, layer: True

    def result(self, inputs: Inputs, stage: str) -> np.ndarray:
        """Make the wrong array of a stage from the inputs of the right one."""
        return IN_STAGE[self.part](self.wrong, inputs, stage) if self.part else self.wrong(inputs, stage)

    def first_layer(self, stage: str, config: ModelConfig) -> int | None:
        """Return the first layer of a model in which the mistake changes a stage; None if the stage is in no layer."""
        if not BY_NAME[stage].in_layer:
            return None
        layers = range(config.n_layers)
        return next(i for i in layers if BY_NAME[stage].applies_to(config, i) and self.in_layers(config, i))

    def changes(self, *, along: bool = False) -> list[tuple[str, Replacement]]:
        """List the functions of llorch that it replaces, with their replacements; with the second one if `along`."""
        return [(self.part, self.wrong), *([self.along] if along and self.along else [])]

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Numbers of the checkpoints that its stages belong to, the first stage's first."""
        return tuple(dict.fromkeys(checkpoint_of(stage) for stage in self.stages))


def training_mistake(
    name: str, stages: tuple[str, ...], part: str, wrong: Replacement, diagnosis: str, **fields: Any
) -> Mistake[Any]:
    """Make a mistake of training that shows in one step, unless `fields` has other cases."""
    fields = {"cases": ONE_STEP} | fields
    return Mistake(name=name, stages=stages, part=part, wrong=wrong, diagnosis=diagnosis, **fields)


def injected(*mistakes: Mistake[Any], along: bool = False) -> AbstractContextManager[None]:
    """Run with mistakes in the code, one upon the other; with what mostly goes wrong with them if `along`."""
    return replaced_all(change for mistake in mistakes for change in mistake.changes(along=along))


def checkpoint_of(stage: str) -> str:
    """Return the checkpoint number of a stage, or of a step after the logits, of a product or of training."""
    steps = AFTER_LOGITS | IN_PRODUCTS | IN_TRAINING
    return steps[stage] if stage in steps else BY_NAME[stage].checkpoint
