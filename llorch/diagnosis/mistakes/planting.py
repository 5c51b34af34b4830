"""Wrong functions put into the running NumPy code, wherever the right one is used, and taken out again."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]  # of a right function: the wrong one


def instead(function: Callable[..., Any]) -> Replacement:
    """Replace a right function by one that does not call it."""
    return lambda right: function


class Plantable(Protocol):
    """A mistake that replaces a function of llorch."""

    @property
    def part(self) -> str:
        """The function, `llorch.train.adamw.moved`."""
        ...

    @property
    def wrong(self) -> Replacement:
        """Makes the wrong function from the right one."""
        ...


@contextmanager
def planted(*mistakes: Plantable) -> Iterator[None]:
    """Run with mistakes in the code, one upon the other; what was there is back at the end, whatever happens.

    The whole process has them meanwhile: nothing else may compute.
    """
    with ExitStack() as planting:
        for mistake in mistakes:
            planting.enter_context(replaced(mistake.part, mistake.wrong))
        yield


@contextmanager
def replaced(part: str, wrong: Replacement) -> Iterator[None]:
    """Put a wrong function wherever the right one, `llorch.train.adamw.moved`, is found under its own name."""
    owner, name = owner_of(part)
    right = getattr(owner, name)
    found = {id(place): (place, vars(place)[name]) for place in (owner, *_users(name, right))}
    made = wrong(right)
    try:
        for place, _ in found.values():
            setattr(place, name, made)
        yield
    finally:
        for place, kept in found.values():
            setattr(place, name, kept)


def owner_of(part: str) -> tuple[Any, str]:
    """Return the module or class that defines a function, and the function's name."""
    path, _, name = part.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name


def _users(name: str, right: Any) -> Iterator[Any]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("llorch") and vars(module).get(name) is right:
            yield module
