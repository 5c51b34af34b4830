"""Wrong functions put into the running NumPy code, wherever the right one is used, and taken out again."""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]  # of a right function: the wrong one


def instead(function: Callable[..., Any]) -> Replacement:
    """Replace a right function by one that does not call it."""
    return lambda right: function


@contextmanager
def replaced_all(changes: Iterable[tuple[str, Replacement]]) -> Iterator[None]:
    """Replace functions, one upon the other; what was there is back at the end, whatever happens.

    The whole process has them meanwhile: nothing else may compute.
    """
    with ExitStack() as planting:
        for part, wrong in changes:
            planting.enter_context(replaced(part, wrong))
        yield


@contextmanager
def replaced(part: str, wrong: Replacement) -> Iterator[None]:
    """Put a wrong function wherever the right one, `llorch.training.adamw.moved`, is found under its own name."""
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


def _users(name: str, right: object) -> list[ModuleType]:
    seen = len(sys.modules), sys.modules[next(reversed(sys.modules))]
    if seen != _Ours.seen:
        _Ours.seen = seen
        _Ours.modules = [module for each, module in list(sys.modules.items()) if each.startswith("llorch")]
    return [module for module in _Ours.modules if vars(module).get(name) is right]


class _Ours:
    """The modules of llorch among thousands of others; they are listed anew after an import."""

    seen: tuple[int, ModuleType] | None = None
    modules: Sequence[ModuleType] = ()
