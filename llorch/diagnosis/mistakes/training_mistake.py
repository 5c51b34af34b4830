"""Known mistake of training: a right function of llorch, and the function that people write instead of it.

A training step is a chain in which one wrong line moves every later number, so a mistake is no variant of one stage but
a function put in the place of another. Tests put it into the running code, wherever the right one is used, and want the
checkpoint of `stages` to go red first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llorch.config import ModelConfig
from llorch.diagnosis.mistakes.mistake import every_model
from llorch.verify.training.stages import BY_GROUP

Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class TrainingMistake:
    """One known mistake of training.

    Attributes:
        name: Kebab-case, unique.
        stages: Groups of the table of training stages; the first is where it shows first.
        diagnosis: The mistake and the right way, in one sentence.
        part: The function that it replaces, `llorch.train.adamw.moved`.
        wrong: Makes the wrong function of the right one.
        cases: Runs that show it.
        applies_to: Tells if it can be made with a configuration.
        along: Second function that mostly goes wrong too, and its replacement: gradients, which others derive from
            the forward pass, and the other use of a setting.
    """

    name: str
    stages: tuple[str, ...]
    diagnosis: str
    part: str
    wrong: Wrong
    cases: tuple[str, ...] = ("plain",)
    applies_to: Callable[[ModelConfig], bool] = every_model
    along: tuple[str, Wrong] | None = None

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Numbers of the checkpoints that its stages belong to, the first stage's first."""
        return tuple(dict.fromkeys(BY_GROUP[stage].checkpoint for stage in self.stages))
