"""Triton's interpreter, quicker: it prepares the language once a launch, and not at every call inside a kernel.

The interpreter puts its own operations in place of those of `triton.language`, and looks through the whole language
for that whenever a kernel calls a function. What it replaced at the start of the launch is still in place then.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Keep calls inside a launch from preparing again; without effect on a Triton that has no such step."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    no_change: Callable[[], Any] | None = getattr(interpreter, "_LangPatchScope", None)
    if prepare is None or no_change is None:
        return
    prepared: set[int] = set()  # modules of the language, while a launch goes on

    def prepare_once(function: Any) -> Any:
        named = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        modules = {id(module) for module in named if module in (tl, tl.core)}
        if modules <= prepared:
            return no_change()
        scope, first = prepare(function), not prepared
        prepared.update(modules)
        if first:  # the scope of the launch; those of calls are restored by nobody
            restore = scope.restore
            scope.restore = lambda: (prepared.clear(), restore())
        return scope

    patch.setattr(interpreter, "_patch_lang", prepare_once)
