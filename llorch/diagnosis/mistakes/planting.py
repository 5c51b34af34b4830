"""Replace functions of the running NumPy code in every module that uses them, and restore them afterwards."""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
Replacement = Callable[[Function], Function]  # right function to wrong function


def instead(function: Function) -> Replacement:
    """Make the replacement that ignores the right function."""
    return lambda right: function


@contextmanager
def replace_all(changes: Iterable[tuple[str, Replacement]]) -> Iterator[None]:
    """Replace functions while the block runs; a later replacement wraps an earlier one of the same function.

    The replacements act in the whole process, so no other thread may compute meanwhile.
    """
    with ExitStack() as stack:
        for part, wrong in changes:
            stack.enter_context(replaced(part, wrong))
        yield


@contextmanager
def replaced(part: str, wrong: Replacement) -> Iterator[None]:
    """Replace a function, such as `llorch.training.adamw.moved`, in every module that has it under this name."""
    owner, name = find_owner(part)
    right = getattr(owner, name)
    users = {id(module): (module, vars(module)[name]) for module in (owner, *_users(name, right))}
    wrong_function = wrong(right)
    try:
        for module, _ in users.values():
            setattr(module, name, wrong_function)
        yield
    finally:
        for module, original in users.values():
            setattr(module, name, original)


def find_owner(part: str) -> tuple[Any, str]:
    """Return the module or class that defines a function, and the function's name."""
    path, _, name = part.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name


def _users(name: str, right: object) -> list[ModuleType]:
    """List llorch's modules that have imported a function under its name."""
    imported = len(sys.modules), sys.modules[next(reversed(sys.modules))]
    if imported != _Llorch.imported:
        _Llorch.imported = imported
        _Llorch.modules = [module for key, module in list(sys.modules.items()) if key.startswith("llorch")]
    return [module for module in _Llorch.modules if vars(module).get(name) is right]


class _Llorch:
    """Cache of llorch's modules, refreshed after an import: a search of all modules for each mistake is slow."""

    imported: tuple[int, ModuleType] | None = None
    modules: Sequence[ModuleType] = ()
