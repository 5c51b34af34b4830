"""Shapes are checked at a twentieth of what jaxtyping's hook costs, on which the suite spent most of its time.

jaxtyping binds the arguments of every call and has beartype check them twice, for its messages. Here only functions
are checked whose annotations name axes (types alone are pyright's), beartype wraps the function itself, and arguments
and results of types, dtypes and shapes that have passed together pass again unchecked. What cannot be wrapped so (a
generator, a class that names itself) is left to jaxtyping. What torch.compile traces is the function alone.
"""

import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any, get_args, get_origin, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

SMALL = 16  # a list or a dict of at most so many values is known by what it holds
_slow: Any = jaxtyping.jaxtyped
_scope = jaxtyping.jaxtyped("context")
_quick = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install() -> None:
    """Have the hook decorate with `checked`; before any module that it is for is imported."""
    jaxtyping.jaxtyped = checked


def checked(target=None, *, typechecker: Any = None) -> Any:
    """What the hook puts on every function and class."""
    if target is None:
        return partial(checked, typechecker=typechecker)
    if inspect.isclass(target):
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = checked(target.__init__, typechecker=typechecker)
        return target
    if not any(_names_axes(hint, target.__globals__) for hint in target.__annotations__.values()):
        return target
    try:
        get_type_hints(target)
    except Exception:  # whatever a text stands for that cannot be read yet, or here
        return _slow(target, typechecker=typechecker)
    return _slow(target, typechecker=typechecker) if inspect.isgeneratorfunction(target) else _remembering(target)


def _names_axes(hint: object, names: dict[str, Any]) -> bool:
    if isinstance(hint, str):
        with suppress(Exception):
            hint = eval(hint, names)
    is_array = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(_names_axes(part, names) for part in get_args(hint))


def _remembering(function: Callable) -> Callable:
    """A function whose check is not repeated for arguments and a result that are of kinds which passed it together."""
    quick, passed = cache(lambda: _quick(function)), dict[Hashable, set[Hashable]]()  # compiled when it is called
    made = threading.local()  # `result`: what `recheck` gives back, which is compiled once and not for every call
    recheck = cache(lambda: _quick(wraps(function)(lambda *args, **kwargs: made.result)))

    @wraps(function)
    def remembering(*args: object, **kwargs: object) -> object:
        if (torch := sys.modules.get("torch")) is not None and torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            given = _kinds(args), (*kwargs, *_kinds(kwargs.values())) if kwargs else None
        except _UnknowableError:
            return _scoped(quick(), args, kwargs)
        kinds = passed.get(given)
        if kinds is None:
            result = _scoped(quick(), args, kwargs)
        else:
            result = function(*args, **kwargs)
            try:
                if _kind(result) in kinds:
                    return result
            except _UnknowableError:
                pass
            made.result = result
            _scoped(recheck(), args, kwargs)
            made.result = None
        with suppress(_UnknowableError):
            passed.setdefault(given, set()).add(_kind(result))
        return result

    return remembering


def _scoped(function: Callable, args: tuple, kwargs: dict[str, object]) -> object:
    """Call a function in a scope for axes of its own."""
    with _scope:
        try:
            return function(*args, **kwargs)
        except jaxtyping.TypeCheckError as error:
            if not hasattr(error, "__notes__"):
                shapes = [str(getattr(value, "shape", type(value).__name__)) for value in (*args, *kwargs.values())]
                error.add_note(f"called with {', '.join(shapes)}")
            raise


class _UnknowableError(Exception):
    """A container of a kind that may hold anything: what it holds is checked, too."""


def _kinds(values: Iterable[Any]) -> tuple[Hashable, ...]:
    return tuple([_kind(value) for value in values])


def _kind(value: Any) -> Hashable:
    """All that a check of a value looks at."""
    kind = type(value)
    if _is_array(kind):
        return kind, value.dtype, value.shape
    if kind is str or kind is type:
        return value
    if not _is_container(kind):
        return kind
    if issubclass(kind, tuple) or (kind is list and len(value) <= SMALL):
        return kind, *_kinds(value)
    if kind is dict and len(value) <= SMALL:
        return kind, _kinds(value), _kinds(value.values())
    raise _UnknowableError


@cache
def _is_array(kind: type) -> bool:
    return hasattr(kind, "__array__") and hasattr(kind, "shape")


@cache
def _is_container(kind: type) -> bool:
    """Tell whether a check looks into it; not into a `Mapping` to anything, as those of a model's weights are."""
    bases = vars(kind).get("__orig_bases__", kind.__bases__)
    to_any = any(base is Mapping or (get_origin(base) is Mapping and get_args(base)[1] is Any) for base in bases)
    return issubclass(kind, Iterable | tuple | str | type) and not to_any
