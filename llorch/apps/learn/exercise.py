"""An exercise: one function that a learner writes, and the llorch function that it replaces in the running code.

Arguments and results are arrays and numbers with names, so that a learner can use any language. An adapter (`Adapt`)
translates between llorch's call and the learner's function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llorch.families.config import ModelConfig

Call = Callable[..., Any]  # called by keyword with arrays, numbers, texts, dicts; returns one result or a tuple
Adapt = Callable[[Call, Call], Call]  # (learner's function, llorch's function) -> function with llorch's signature


def by_keyword(*names: str) -> Adapt:
    """Make an adapter that passes llorch's positional arguments under these names, in this order."""
    return lambda call, right: lambda *args, **kw: call(**dict(zip(names[: len(args)], args, strict=True)), **kw)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One function of a lesson.

    Attributes:
        name: Name of the exercise, and of the function in the learner's file.
        reference: llorch's function with the learner's parameters; it runs while the exercise is unwritten.
        returns: Names of its results, one or several.
        replaces: llorch's function that it replaces, such as `llorch.ops.rope.rope`.
        adapt: Makes the replacement from the learner's function and llorch's function.
        also: Other llorch functions that it replaces, each with its `adapt`.
        streams: True if it takes the model as a function and yields token ids.
        on_torch: True if its arrays are torch tensors.
        stages: Stages (named arrays of a run) that it computes, see `llorch.stages`.
        hidden: Stages that no observer gets while it is installed, because its code computes them internally.
    """

    name: str
    reference: Call
    returns: tuple[str, ...]
    replaces: str
    adapt: Adapt
    also: tuple[tuple[str, Adapt], ...] = ()
    streams: bool = False
    on_torch: bool = False
    stages: tuple[str, ...] = ()
    hidden: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()

    def __post_init__(self) -> None:
        """Name a lambda reference after the exercise, because Python shows that name in errors of a call."""
        if getattr(self.reference, "__name__", "") == "<lambda>":
            self.reference.__name__ = self.reference.__qualname__ = self.name

    @property
    def places(self) -> Mapping[str, Adapt]:
        """Map every llorch function that the exercise replaces to its adapter."""
        return {self.replaces: self.adapt, **dict(self.also)}

    @property
    def in_python_only(self) -> bool:
        """True if only Python can solve the exercise: files for a program cannot hold its inputs."""
        return self.streams or self.on_torch

    def results(self, returned: Any) -> Mapping[str, Any]:
        """Map the names of the results to the values that a call returned."""
        return dict(zip(self.returns, returned if len(self.returns) > 1 else (returned,), strict=True))
