"""A part: one function that a learner writes, and the place in the running code that it takes.

What a learner gets and gives are arrays and plain numbers by name, in any language; what surrounds it stays ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llorch.families.config import ModelConfig

Call = Callable[..., Any]  # a part by keyword: arrays, numbers, texts, a dict of arrays; returns one result or a tuple

Adapt = Callable[[Call, Call], Call]


def by_keyword(*names: str) -> Adapt:
    """Make a wrapper that passes positional arguments under these names, in this order."""
    return lambda call, right: lambda *given, **how: call(**dict(zip(names[: len(given)], given, strict=True)), **how)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One function of a lesson.

    Attributes:
        name: Of the function in the learner's file.
        reference: llorch's function with the learner's parameters; borrowed where nothing is written yet.
        returns: Names of what it returns, one or several.
        replaces: llorch's function that it replaces, such as `llorch.ops.rope.rope`.
        adapt: Makes the replacement from the learner's function and llorch's.
        also: Other functions of llorch that it replaces, each with its `adapt`.
        streams: Whether it is given a function and yields whole numbers.
        on_torch: Whether its arrays are torch tensors.
        stages: Of the stage table, that it makes.
        hidden: Stages that do not show while it stands there, because they are made inside it.
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
        """Give a reference that is a lambda the part's name, which Python shows where a call is wrong."""
        if getattr(self.reference, "__name__", "") == "<lambda>":
            self.reference.__name__ = self.reference.__qualname__ = self.name

    @property
    def places(self) -> Mapping[str, Adapt]:
        """Map every function of llorch that it replaces to what makes the replacement."""
        return {self.replaces: self.adapt, **dict(self.also)}

    @property
    def in_python_only(self) -> bool:
        """True if only Python can solve the exercise: files for a program cannot hold its inputs."""
        return self.streams or self.on_torch

    def results(self, returned: Any) -> Mapping[str, Any]:
        """Map the names of the results to what a call returned."""
        return dict(zip(self.returns, returned if len(self.returns) > 1 else (returned,), strict=True))
