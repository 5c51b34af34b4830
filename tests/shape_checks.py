"""Shapes and types are checked at a tenth of what jaxtyping's hook costs, on which the suite spent most of its time.

jaxtyping binds the arguments of every call and has beartype check them twice, for its messages. Here beartype wraps
the function itself, and only one whose annotations name axes gets a scope for them. What cannot be wrapped so (a
generator, a class that names itself) is left to jaxtyping.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

_slow: Any = jaxtyping.jaxtyped
_scope = jaxtyping.jaxtyped("context")
_quick = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install() -> None:
    """Have the hook decorate with `checked`; before any module that it is for is imported."""
    jaxtyping.jaxtyped = checked


def checked(what=None, *, typechecker: Any = None) -> Any:
    """What the hook puts on every function and class."""
    if what is None:
        return partial(checked, typechecker=typechecker)
    if inspect.isclass(what):
        if dataclasses.is_dataclass(what) and "__init__" in vars(what):
            what.__init__ = checked(what.__init__, typechecker=typechecker)
        return what
    try:
        hints = get_type_hints(what, include_extras=True)
    except (NameError, TypeError):
        hints = None
    if hints is None or inspect.isgeneratorfunction(what):
        return _slow(what, typechecker=typechecker)
    return _scoped(_quick(what)) if any(map(_names_axes, hints.values())) else _quick(what)


def _names_axes(hint: object) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_names_axes, get_args(hint)))


def _scoped(function: Callable) -> Callable:
    @wraps(function)
    def scoped(*args: object, **kwargs: object) -> object:
        with _scope:
            try:
                return function(*args, **kwargs)
            except jaxtyping.TypeCheckError as error:
                if not hasattr(error, "__notes__"):
                    shapes = [str(getattr(value, "shape", type(value).__name__)) for value in (*args, *kwargs.values())]
                    error.add_note(f"called with {', '.join(shapes)}")
                raise

    return scoped
