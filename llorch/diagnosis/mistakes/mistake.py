"""Known mistake: the wrong function that people write instead of a right one, with a name and a sentence.

Both functions read the same inputs, so an array that equals the wrong function's output identifies its mistake. In a
training step one wrong line changes every later number. So a training mistake replaces a function of llorch in the
running code, and `stages` are the first arrays that it changes.

A *stage* is a named array of the forward pass or of a training step. A *checkpoint* is a numbered validation point of
llorch, a group of stages; it is no file of weights.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from llorch.diagnosis.mistakes.in_stage import IN_STAGE
from llorch.diagnosis.mistakes.planting import Replacement, replace_all
from llorch.families.config import ModelConfig
from llorch.stages.table import BY_NAME, CHECKPOINTS
from llorch.stages.training import BY_GROUP

Inputs = TypeVar("Inputs")
Wrong = Callable[[Inputs, str], np.ndarray]  # (inputs, stage name) to the wrong array
AFTER_LOGITS = {name: number for number, name in CHECKPOINTS.items() if "09" <= number <= "12"}  # step -> checkpoint
IN_PRODUCTS = {"decode": "13", "rounding": "13", "product": "13"}  # decoded matrix, rounded activations, result
PLAIN_RUN = ("plain",)  # default of `cases` for training: the run without label smoothing and rsLoRA


@dataclass(frozen=True, kw_only=True)
class Mistake(Generic[Inputs]):
    """Known mistake: the wrong function that people write instead of a right one.

    Attributes:
        name: Unique name in kebab case.
        stages: Stages that it makes wrong, in the order of the run: stages of the table or of training, one of
            `AFTER_LOGITS`, or some of `IN_PRODUCTS`.
        diagnosis: The mistake and the right way, in one sentence.
        part: Name of the replaced function: a part of a stage's computation, which learners write in a lesson
            (`rms_norm`, see `in_stage`), or a function of llorch (`llorch.training.adamw.moved`). Empty if the mistake
            replaces the whole computation of a stage.
        wrong: Maps the right function to the wrong one; without `part`, a stage's inputs and name to the wrong array.
        also: Further functions of (inputs, stage name) like `result`, for code with this mistake that differs in edge
            cases.
        along: Second function of llorch that people who make this mistake usually get wrong too, with its replacement:
            the gradient of a wrong forward pass, or the second use of a setting.
        reads: Stages that it reads in addition to the inputs of the right stage.
        cases: Test inputs that reveal it. Stages: positions from 0 (`near`) or far from 0 (`far`), or `long` (more
            tokens than a layer attends to, in no golden). Products: types of a matrix. Others: cases of its
            checkpoint (`top_p`, `step 2`).
        rounds: True if it rounds to few bits; llorch may round values near a tie otherwise than the engine.
        after_cached: True if it shows only in a pass that continues a cache.
        applies_to: Predicate: True if a model can have the mistake. It does not check that the model has the stages.
        in_layers: Predicate: True for a layer in which it can occur.
    """

    name: str
    stages: tuple[str, ...]
    diagnosis: str
    wrong: Callable[..., Any]
    part: str = ""
    also: tuple[Wrong[Inputs], ...] = ()
    along: tuple[str, Replacement] | None = None
    reads: tuple[str, ...] = ()
    cases: tuple[str, ...] = ("near", "far")
    rounds: bool = False
    after_cached: bool = False
    applies_to: Callable[[ModelConfig], bool] = lambda config: True
    in_layers: Callable[[ModelConfig, int], bool] = lambda config, layer: True

    def result(self, inputs: Inputs, stage: str) -> np.ndarray:
        """Compute the wrong array of a stage from the inputs of the right one; not for training mistakes."""
        return IN_STAGE[self.part](self.wrong, inputs, stage) if self.part else self.wrong(inputs, stage)

    def first_layer(self, stage: str, config: ModelConfig) -> int | None:
        """Return the first layer in which the mistake changes a stage; None for a stage outside the layers."""
        if not BY_NAME[stage].in_layer:
            return None
        layers = range(config.n_layers)
        return next(i for i in layers if BY_NAME[stage].applies_to(config, i) and self.in_layers(config, i))

    def changes(self, *, along: bool = False) -> list[tuple[str, Replacement]]:
        """List a training mistake's replaced functions and replacements, including the second one if `along`."""
        return [(self.part, self.wrong), *([self.along] if along and self.along else [])]

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Numbers of the checkpoints that its stages belong to, without duplicates, in the order of `stages`."""
        return tuple(dict.fromkeys(checkpoint_of(stage) for stage in self.stages))


def training_mistake(
    name: str, stages: tuple[str, ...], part: str, wrong: Replacement, diagnosis: str, **fields: Any
) -> Mistake[Any]:
    """Make a training mistake that one step of the plain run reveals, unless `fields` has other `cases`."""
    fields = {"cases": PLAIN_RUN} | fields
    return Mistake(name=name, stages=stages, part=part, wrong=wrong, diagnosis=diagnosis, **fields)


def injected(*mistakes: Mistake[Any], along: bool = False) -> AbstractContextManager[None]:
    """Inject training mistakes while the block runs; with `along`, their second functions too."""
    return replace_all(change for mistake in mistakes for change in mistake.changes(along=along))


def checkpoint_of(stage: str) -> str:
    """Return the checkpoint number of a stage: of the table, after the logits, of a product or of training."""
    if number := AFTER_LOGITS.get(stage) or IN_PRODUCTS.get(stage):
        return number
    return (BY_GROUP[stage] if stage in BY_GROUP else BY_NAME[stage]).checkpoint
